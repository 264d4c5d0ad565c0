"""Options and start-up code shared by the device commands; imports nothing heavy."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_fl.cli import fleet_name
from edge_fl.console.output import is_quiet

if TYPE_CHECKING:
    from edge_fl_devices.runtime.runner import Runner

HostOption = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="HOST", rich_help_panel="Connection", help="Host of the broker [127.0.0.1]."
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="N",
        rich_help_panel="Connection",
        min=1,
        max=65535,
        help="Port of the broker [8883 with an identity, else 1883].",
    ),
]
FleetOption = Annotated[
    str | None,
    typer.Option(
        "--fleet",
        metavar="FLEET",
        rich_help_panel="Connection",
        help="Name of the fleet [main].",
        callback=fleet_name,
    ),
]

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="TOML file with the device's settings; options override it."
    ),
]
IdOption = Annotated[
    str | None, typer.Option("--id", metavar="DEVICE", help="Name of the device: a-z, 0-9 and '-'.")
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="SOURCE", help="Images of the device: a folder, an .npz, or python:module:function."
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option("--dir", metavar="FOLDER", rich_help_panel="Folders", help="Folder of the device [device]."),
]
ExistingFolder = Annotated[
    Path,
    typer.Option(
        "--dir",
        metavar="FOLDER",
        rich_help_panel="Folders",
        envvar="EDGE_FL_DIR",
        readable=False,  # who may read it is said when it is read
        help="Folder of the device.",
    ),
]
DEVICE_FOLDER = Path("device")
TopOption = Annotated[
    int,
    typer.Option(
        "--top",
        metavar="N",
        rich_help_panel="Predictions",
        min=1,
        help="Number of classes to list for each picture.",
    ),
]
PrecisionOption = Annotated[
    float | None,
    typer.Option(
        "--precision",
        metavar="SHARE",
        rich_help_panel="Predictions",
        min=0.0,
        max=0.999,
        help="Answer only from the probability at which this share of the answers is correct; 0 answers all [the device's settings].",
    ),
]
FalseAlarmOption = Annotated[
    float | None,
    typer.Option(
        "--false-alarm",
        metavar="SHARE",
        rich_help_panel="Predictions",
        min=0.0,
        max=0.5,
        help="Share of pictures like the device's own that may be called unknown; 0 rejects none [the device's settings, 0.05].",
    ),
]


def connection(
    host: str | None, port: int | None, fleet: str | None, identity: Path | None = None
) -> dict[str, object]:
    """Return the given connection options as settings of `edge_fl_devices.config.DeviceBroker`."""
    options = {"host": host, "port": port, "fleet": fleet, "identity": identity and os.fspath(identity)}
    return {name: value for name, value in options.items() if value is not None}


def stop_on_signal(runner: Runner) -> None:
    """Make the first SIGINT or SIGTERM disconnect the devices cleanly, and the second one end the process."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        runner.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def log_warnings() -> None:
    """Log warnings to stderr; under `--quiet` only errors."""
    level = logging.ERROR if is_quiet() else logging.WARNING
    handler = logging.StreamHandler()
    handler.setLevel(level)  # the agent's own log takes more (`edge_fl_devices.remote.log_file`)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])


def full_worker() -> Any:
    """Return the worker class of full devices; importing it loads torch."""
    from edge_fl_devices.workers.full import FullWorker

    return FullWorker
