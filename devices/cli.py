"""The commands `edge-fl device ...` and `edge-fl fleet up`; `edge-fl flash` stands in devices/flash/cli.py."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from devices.flash.cli import flash
from edge_fl.cli import App, Format, FormatOption, IdentityOption, is_quiet, say, show_table
from edge_fl.errors import ConfigError, RunError

if TYPE_CHECKING:
    from devices.outcome import Progress
    from devices.runner import Runner
    from devices.screen import Screen

Host = Annotated[str | None, typer.Option(help="The broker's host [127.0.0.1].")]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="The broker's port [8883 with an identity, else 1883].")
]
Fleet = Annotated[str | None, typer.Option(help="The fleet's name [main].")]
Folder = Annotated[Path, typer.Option("--dir", envvar="EDGE_FL_DIR", help="The device's own folder.")]
DEVICE_FOLDER = Path("device")
FLEET_FOLDER = Path("runs/fleet")

DEVICE_COLUMNS = {
    "device": "device",
    "tier": "tier",
    "head": "head",
    "samples": "samples",
    "release": "release",
    "reports": "reports",
    "accepted": "taken",
    "before": "before",
    "after": "after",
    "global_test": "global",
    "bytes_down": "bytes down",
    "bytes_up": "bytes up",
    "seconds": "seconds",
    "why": "why",
}


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
    """Run one device's agent until Ctrl-C; it waits for the broker as long as it takes."""
    from devices import config as settings
    from devices.board.notify import Notifier
    from devices.entry import entry, own_entry
    from devices.runner import Runner
    from devices.single import run_device
    from edge_fl.progress import Progress

    given = {"id": id, "data": data, "tier": tier, "head": head, "folder": folder, "root": root, "seed": seed}
    at = {"host": host, "port": port, "fleet": fleet, "identity": identity and str(identity)}
    chosen = settings.chosen(config, given, at)
    _log_warnings()
    broker = chosen.broker
    if broker.identity:
        connect, renewal = own_entry(broker.host, broker.port, Path(broker.identity), broker.fleet, say)
        tick: Callable[[], None] = renewal.tick
    else:
        connect, tick = entry(broker.endpoint), lambda: None
    runner = Runner(notifier=Notifier())
    _stop_on_signal(runner)
    with Progress() as progress:
        run_device(chosen, connect, runner, _full_worker, progress.say, tick, progress)


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
    from devices.predict import MAX_PICTURE_BYTES, Predictor

    predictor = Predictor(folder, remember=True)
    if export:
        from devices.serving.fused import export as write

        say(f"{export}: {write(predictor, export)} bytes; it answers as the pair does")
    if source == "-":
        picture = sys.stdin.buffer.read(MAX_PICTURE_BYTES)
        rows = [asdict(predictor.read_picture("-", picture))]
    elif source or not export:
        rows = [asdict(prediction) for prediction in predictor.read(Path(source))]
    else:
        return
    show_table(rows, {"name": "image", "label": "class", "probability": "probability"}, format)


def serve(
    folder: Folder = DEVICE_FOLDER,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On loopback; 0 is any free one.")] = 8000,
) -> None:
    """Predict over HTTP, for programs on this device: POST a picture to /predict."""
    from devices.serving.serve import Service

    with Service(folder, port) as service:
        say(f"http://127.0.0.1:{service.port}/predict serves {folder}; Ctrl-C ends it")
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
    findings = examine(settings.chosen(config, {"id": id, "data": data, "folder": folder}, at), say)
    columns = {"check": "check", "state": "state", "found": "found", "remedy": "remedy"}
    show_table([asdict(finding) for finding in findings], columns, format)
    sys.stdout.flush()
    if failed := [finding.check for finding in findings if finding.state == "failed"]:
        raise RunError(f"{', '.join(failed)}: not as needed; what to do stands in the table")


def status(folder: Folder = DEVICE_FOLDER, format: FormatOption = Format.TABLE) -> None:
    """Show what this device keeps: the release it serves, its head, reports on their way."""
    from devices.status import read

    show_table(read(folder), {"what": "what", "value": "value"}, format)


def up(
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many [the sum of --head and --full, or 12].")
    ] = None,
    head: Annotated[str, typer.Option(help="Head-only devices: a number (8) or a fraction (0.8).")] = "",
    full: Annotated[str, typer.Option(help="Full devices: a number (2) or a fraction (0.2).")] = "",
    heads: Annotated[
        str, typer.Option(help="Kinds of heads, in turn over the head-only devices; auto chooses.")
    ] = "logistic,svm,mlp",
    dataset: Annotated[str, typer.Option(help="The dataset that is split over the devices.")] = "digits",
    data_dir: Annotated[Path, typer.Option(help="Where datasets are kept.")] = Path(".data"),
    partition: Annotated[str, typer.Option(help="dirichlet, pathological, domain or iid.")] = "dirichlet",
    beta: Annotated[float, typer.Option(help="Of the Dirichlet distribution: small is uneven.")] = 0.3,
    fraction: Annotated[float, typer.Option(help="The share of the samples that is used.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of who is full.")] = 0,
    host: Annotated[str, typer.Option(help="The broker's host.")] = "127.0.0.1",
    port: Port = None,
    fleet: Annotated[str, typer.Option(help="The fleet's name.")] = "main",
    identities: Annotated[
        Path | None,
        typer.Option(
            "--identities",
            help="The folder of their identities (edge-fl fleet enrol --baked): TLS [plaintext].",
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", help="Where the devices keep what they keep.")
    ] = FLEET_FOLDER,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that train and fit [one per processor].")
    ] = None,
    duration_s: Annotated[float, typer.Option("--duration", min=0, help="Seconds; 0 is until Ctrl-C.")] = 0.0,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when the server has gone, or nothing happens any more.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show every device in a living table, on a terminal.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the broker.")] = 60.0,
    chaos: Annotated[
        str, typer.Option(help="What goes wrong: a TOML file, or lossy, slow, crashes, restarts, everything.")
    ] = "",
    format: FormatOption = Format.TABLE,
) -> None:
    """Run a simulated fleet over a real broker, with the agents that real devices run."""
    import msgspec

    from devices.chaos import profile
    from devices.entry import entries, entry
    from devices.fleet import FleetConfig, run_fleet, shares
    from devices.store import Store
    from edge_fl.config import DataConfig
    from edge_fl.heads import find
    from edge_fl.heads.auto import AUTO
    from edge_fl.wire.endpoint import PORT, TLS_PORT, Endpoint

    heads_only, trains = shares(devices if devices or head or full else 12, head, full)
    kinds = tuple(kind.strip() for kind in heads.split(","))
    for kind in kinds:
        try:
            if kind != AUTO:
                find(kind)
        except ConfigError as error:
            raise ConfigError(f"--heads {heads}: {error}; nothing was started") from error
    tree = {
        "dataset": dataset,
        "data_dir": str(data_dir),
        "clients": heads_only + trains,
        "partition": partition,
        "beta": beta,
        "fraction": fraction,
    }
    try:
        data = msgspec.convert(tree, DataConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"fleet up: {error}; nothing was started") from error
    endpoint = Endpoint(host, port or (TLS_PORT if identities else PORT))
    if identities:
        ids, connect = entries(host, endpoint.port, identities, heads_only + trains)
    else:
        ids, connect = (), entry(endpoint)
    config = FleetConfig(
        data,
        trains,
        folder,
        fleet,
        kinds,
        seed,
        workers or os.cpu_count() or 1,
        duration_s=duration_s or float("inf"),
        until_idle=until_idle,
        wait_s=wait_s,
        ids=ids,
        chaos=profile.load(chaos) if chaos else None,
    )
    _log_warnings()
    full_worker = _full_worker() if trains else None
    say(
        f"{heads_only + trains} devices, {trains} of them full, on {dataset}; broker {endpoint}"
        f"{' (TLS)' if identities else ''}, fleet {fleet}{f', chaos {chaos}' if chaos else ''}"
    )
    with (
        Store(folder).owned(),
        _screen() if watch and sys.stderr.isatty() and not is_quiet() else nullcontext() as screen,
    ):

        def on_start(runner: Runner) -> None:
            _stop_on_signal(runner)
            if screen:
                screen.devices = runner.devices

        tell = screen or _Line()
        outcomes = run_fleet(config, connect, full_worker=full_worker, tell=tell, on_start=on_start)
    show_table([asdict(outcome) for outcome in outcomes], DEVICE_COLUMNS, format)


def _screen() -> Screen:
    from devices.screen import Screen

    return Screen()


class _Line:
    """How it goes as one living line on a terminal, as a new line for what is new elsewhere."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._last, self._said_s = "", 0.0

    def __call__(self, progress: Progress) -> None:
        line, now_s = str(progress), time.monotonic()
        if is_quiet() or line == self._last:
            return
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        elif now_s - self._said_s >= self.EVERY_S:
            say(line)
            self._said_s = now_s
        else:
            return
        self._last = line


def _full_worker() -> Any:
    from devices.full import FullWorker

    return FullWorker


def _stop_on_signal(runner: Runner) -> None:
    """The first Ctrl-C lets the devices leave in order, the second ends at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        runner.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _log_warnings() -> None:
    logging.basicConfig(level=logging.ERROR if is_quiet() else logging.WARNING, format="%(message)s")
