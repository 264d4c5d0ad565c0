"""Options and start-up code shared by the device commands; imports nothing heavy."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from edge_fl.console.output import is_quiet
from edge_fl.options import FOLDERS, ConnectionOptions, option
from edge_fl.signals import STOPS

if TYPE_CHECKING:
    from edge_fl_devices.runtime.runner import Runner

DEVICE_FOLDER = Path("device")
PREDICTIONS = "Predictions"  # heading in the help
IdOption = Annotated[str | None, option("--id DEVICE", "Name of the device: a-z, 0-9 and '-'.")]
ConfigOption = Annotated[
    Path | None, option("--config FILE", "TOML file with the device's settings; options override it.")
]
ExistingFolder = Annotated[
    Path,
    option(
        "--dir FOLDER",
        "Folder of the device.",
        FOLDERS,
        envvar="EDGE_FL_DIR",
        readable=False,  # who may read it is said when it is read
    ),
]
FolderOrThatOfSettings = Annotated[
    Path | None,
    option(
        "--dir FOLDER",
        "Folder of the device [that of --config, else device].",
        FOLDERS,
        envvar="EDGE_FL_DIR",
        readable=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(ConnectionOptions):
    """The settings of a device: a file, and options that replace what it says."""

    config: ConfigOption = None
    id: IdOption = None
    data: Annotated[
        str | None,
        option(
            "--data SOURCE",
            "Data of the device: a folder with one per class, an .npz, a .csv, or python:module:function.",
        ),
    ] = None
    folder: Annotated[Path | None, option("--dir FOLDER", "Folder of the device [device].", FOLDERS)] = None

    def tree(self, **more: object) -> tuple[dict[str, object], str]:
        """The settings before they are checked, and where they come from. Raises ConfigError."""
        from edge_fl_devices.config import read_tree

        options = {"id": self.id, "data": self.data, "folder": self.folder, **more}
        return read_tree(self.config, options, self.given())

    def of_agent(self) -> tuple[dict[str, object], str]:
        """Like `tree`; without a file, of the settings that this board was flashed with, or with which the agent last ran here."""
        from edge_fl_devices import config
        from edge_fl_devices.board.installation import settings_file

        options = {"id": self.id, "data": self.data, "folder": self.folder}
        file = self.config or settings_file()
        before = None if file else config.remembered(self.folder or DEVICE_FOLDER)
        return config.read_tree(file, options, self.given(), before)


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What the agent does, and whose releases it accepts."""

    tier: Annotated[str | None, option("--tier TIER", "Kind of device: auto, head or full [auto].")] = None
    head: Annotated[
        str | None,
        option(
            "--head HEAD",
            "Kind of personal head: logistic, cosine, svm, mlp, nearest or auto [logistic].",
        ),
    ] = None
    root: Annotated[
        Path | None,
        option(
            "--root FILE",
            "Root of trust for releases, as installed with the device [trust on first use].",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """How samples are answered."""

    top: Annotated[
        int, option("--top N", "Number of classes to list for each sample.", PREDICTIONS, min=1)
    ] = 1
    promise: Annotated[
        float | None,
        option(
            "--promise SHARE",
            "Answer only where the set that has the right class for this share of all samples is a single class; 0 answers all"
            " [the device's settings].",
            PREDICTIONS,
            min=0.0,
            max=0.999,
        ),
    ] = None
    false_alarm: Annotated[
        float | None,
        option(
            "--false-alarm SHARE",
            "Share of samples like the device's own that may be called unknown; 0 rejects none [the device's settings, 0.05].",
            PREDICTIONS,
            min=0.0,
            max=0.5,
        ),
    ] = None

    @property
    def values(self) -> dict[str, Any]:
        """The arguments of `edge_fl_devices.serving.predict.Predictor`."""
        return {"top": self.top, "promise": self.promise, "false_alarm": self.false_alarm}


def stop_on_signal(runner: Runner) -> None:
    """Make the first SIGINT or SIGTERM disconnect the devices cleanly, and the second one end the process."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        runner.stop(STOPS[signal.Signals(number)].words)

    for number in STOPS:
        signal.signal(number, stop)


def log_warnings(handler: logging.Handler | None = None) -> None:
    """Log warnings to stderr, or with `handler`; under `--quiet` only errors."""
    level = logging.ERROR if is_quiet() else logging.WARNING
    handler = handler or logging.StreamHandler()
    handler.setLevel(level)  # the agent's own log takes more (`edge_fl_devices.remote.log_file`)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])


def full_worker() -> Any:
    """Return the worker class of full devices; importing it loads torch."""
    from edge_fl_devices.workers.full import FullWorker

    return FullWorker
