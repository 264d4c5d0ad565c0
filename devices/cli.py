"""The commands `edge-fl device ...`; `edge-fl fleet up` stands in devices/simulated/cli.py, `edge-fl flash` in devices/flash/cli.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from devices.flash.cli import flash
from devices.options import Port, full_worker, log_warnings, stop_on_signal
from devices.simulated.cli import up
from edge_fl.cli import App, FormatOption, IdentityOption, fleet_name
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.errors import InputError, RunError

if TYPE_CHECKING:
    from devices.child import Children

Host = Annotated[str | None, typer.Option(help="The broker's host [127.0.0.1].")]
Fleet = Annotated[str | None, typer.Option(help="The fleet's name [main].", callback=fleet_name)]
Folder = Annotated[Path, typer.Option("--dir", envvar="EDGE_FL_DIR", help="The device's own folder.")]
DEVICE_FOLDER = Path("device")


def register(app: App) -> None:
    """Adds the group `device`, `fleet up` and `flash`."""
    device = app.group("device", help="One device, on the device: run its agent, predict, see how it is.")
    for command in (run, predict, serve, status, doctor):
        device.command()(command)
    app.group("fleet", help="Many devices: simulate them, list, enrol and revoke them.").command()(up)
    app.root.command()(flash)


def run(
    config: Annotated[
        Path | None, typer.Option(help="Settings in TOML; options given here replace them.")
    ] = None,
    id: Annotated[str | None, typer.Option(help="The device's name: a-z, 0-9 and '-'.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Its images: a folder, an .npz, or python:module:function.")
    ] = None,
    tier: Annotated[str | None, typer.Option(help="auto, head or full [auto].")] = None,
    head: Annotated[
        str | None, typer.Option(help="The personal head: logistic, svm, mlp, nearest or auto [logistic].")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="The device's own folder [device].")] = None,
    root: Annotated[
        Path | None, typer.Option(help="The release root it was shipped with [trust the first].")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the split into training and test images [0].")] = None,
    host: Host = None,
    port: Port = None,
    fleet: Fleet = None,
    identity: IdentityOption = None,
) -> None:
    """Run one device's agent until Ctrl-C; it waits for the broker without a limit."""
    from devices.child import feature_children

    given = {"id": id, "data": data, "tier": tier, "head": head, "folder": folder, "root": root, "seed": seed}
    at = {"host": host, "port": port, "fleet": fleet, "identity": identity and str(identity)}
    with closing(feature_children()) as children:
        children.start()  # it loads while the agent does
        _run(config, given, at, children)


def _run(
    file: Path | None, given: Mapping[str, object], at: Mapping[str, object], children: Children
) -> None:
    from devices import config as settings
    from devices.board.systemd_notify import Notifier
    from devices.runtime.connector import connector, own_connector
    from devices.runtime.run_device import run_device
    from devices.runtime.runner import Runner
    from edge_fl.console.progress import Progress

    chosen = settings.chosen(file, given, at)
    log_warnings()
    broker = chosen.broker
    if broker.identity:
        connect, renewal = own_connector(
            broker.host, broker.port, Path(broker.identity), broker.fleet, print_status
        )
        tick: Callable[[], None] = renewal.tick
    else:
        connect, tick = connector(broker.endpoint), lambda: None
    runner = Runner(notifier=Notifier())
    stop_on_signal(runner)
    with Progress() as progress:
        run_device(chosen, connect, runner, children, full_worker, progress.print, tick, progress)


def predict(
    source: Annotated[
        str, typer.Argument(help="A picture, a folder of pictures, an .npz, or - for a picture on stdin.")
    ] = "",
    folder: Folder = DEVICE_FOLDER,
    export: Annotated[
        Path | None, typer.Option(help="Write extractor and head as one ONNX model to this file.")
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Predict with the extractor and the personal head that this device serves; no broker needed."""
    from devices.serving.predict import MAX_PICTURE_BYTES, Predictor

    if not (source or export):
        raise InputError(
            "device predict: expected a picture, a folder of pictures, an .npz, - for standard input, or --export"
        )
    predictor = Predictor(folder, remember=True)
    if export:
        from devices.serving.fused import export as write

        print_status(f"{export}: {write(predictor, export)} bytes; it answers as the pair does")
    if source == "-":
        picture = sys.stdin.buffer.read(MAX_PICTURE_BYTES)
        rows = [asdict(predictor.read_picture("-", picture))]
    elif source:
        rows = [asdict(prediction) for prediction in predictor.read(Path(source))]
    else:
        return
    show_table(rows, {"name": "image", "label": "class", "probability": "probability"}, format)


def serve(
    folder: Folder = DEVICE_FOLDER,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On loopback; 0 is any free one.")] = 8000,
) -> None:
    """Predict over HTTP, for programs on this device: POST a picture to /predict."""
    from devices.serving.http_server import Service

    with Service(folder, port) as service:
        print_status(f"http://127.0.0.1:{service.port}/predict serves {folder}; Ctrl-C ends it")
        service.run()


def doctor(
    config: Annotated[Path | None, typer.Option(help="The device's settings in TOML.")] = None,
    id: Annotated[str | None, typer.Option(help="The device's name.")] = None,
    data: Annotated[str | None, typer.Option(help="Its images.")] = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="The device's own folder [device].")] = None,
    host: Host = None,
    port: Port = None,
    fleet: Fleet = None,
    identity: IdentityOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Look for what may be wrong with this device, and say what to do about it; exit code 1 if anything failed."""
    from devices import config as settings
    from devices.doctor import examine

    at = {"host": host, "port": port, "fleet": fleet, "identity": identity and str(identity)}
    findings = examine(settings.chosen(config, {"id": id, "data": data, "folder": folder}, at), print_status)
    columns = {"check": "check", "state": "state", "found": "found", "remedy": "remedy"}
    show_table([asdict(finding) for finding in findings], columns, format)
    sys.stdout.flush()
    if failed := [finding.check for finding in findings if finding.state == "failed"]:
        raise RunError(f"{', '.join(failed)}: not as needed; what to do stands in the table")


def status(folder: Folder = DEVICE_FOLDER, format: FormatOption = Format.TABLE) -> None:
    """Show what this device keeps: the release it serves, its head, reports on their way."""
    from devices.doctor.status import read

    show_table(read(folder), {"what": "what", "value": "value"}, format)
