"""The command `edge-fl fleet up`: a simulated fleet over a real broker."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from devices.options import Port, full_worker, log_warnings, stop_on_signal
from edge_fl.cli import FormatOption, fleet_name
from edge_fl.console.output import Format, is_quiet, print_status, show_table
from edge_fl.errors import ConfigError

if TYPE_CHECKING:
    from devices.runtime.runner import Runner
    from devices.simulated.fleet_status import Progress
    from devices.simulated.live_table import Screen

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
    seed: Annotated[int, typer.Option(min=0, help="Of the split, and of which devices are full.")] = 0,
    host: Annotated[str, typer.Option(help="The broker's host.")] = "127.0.0.1",
    port: Port = None,
    fleet: Annotated[str, typer.Option(help="The fleet's name.", callback=fleet_name)] = "main",
    identities: Annotated[
        Path | None,
        typer.Option(
            "--identities",
            help="The folder of their identities (edge-fl fleet enrol --baked): TLS [plaintext].",
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", help="The folder of the devices' own folders.")
    ] = FLEET_FOLDER,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that train and fit [one per processor].")
    ] = None,
    duration_s: Annotated[float, typer.Option("--duration", min=0, help="Seconds; 0 is until Ctrl-C.")] = 0.0,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when the server has left or no device is busy.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show every device in a table that is updated in place.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the broker.")] = 60.0,
    chaos: Annotated[
        str,
        typer.Option(help="Faults to inject: a TOML file, or lossy, slow, crashes, restarts, everything."),
    ] = "",
    format: FormatOption = Format.TABLE,
) -> None:
    """Run a simulated fleet over a real broker, with the agents that real devices run."""
    from devices.runtime.connector import connector, fleet_connector
    from devices.simulated.chaos import profile
    from devices.simulated.fleet import FleetConfig, run_fleet, shares
    from devices.storage.store import Store
    from edge_fl.config import DataConfig, checked
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
            raise ConfigError(f"--heads {heads}: {error}") from error
    tree = {
        "dataset": dataset,
        "data_dir": str(data_dir),
        "clients": heads_only + trains,
        "partition": partition,
        "beta": beta,
        "fraction": fraction,
    }
    data = checked(tree, DataConfig, "fleet up")
    endpoint = Endpoint(host, port or (TLS_PORT if identities else PORT))
    if identities:
        ids, connect = fleet_connector(host, endpoint.port, identities, heads_only + trains)
    else:
        ids, connect = (), connector(endpoint)
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
    log_warnings()
    worker = full_worker() if trains else None
    print_status(
        f"{heads_only + trains} devices, {trains} of them full, on {dataset}; broker {endpoint}"
        f"{' with identities' if identities else ''}, fleet {fleet}{f', chaos {chaos}' if chaos else ''}"
    )
    with (
        Store(folder).owned(),
        _screen() if watch and sys.stderr.isatty() and not is_quiet() else nullcontext() as screen,
    ):

        def on_start(runner: Runner) -> None:
            stop_on_signal(runner)
            if screen:
                screen.devices = runner.devices

        tell = screen or _Line()
        outcomes = run_fleet(config, connect, full_worker=worker, tell=tell, on_start=on_start)
    show_table([asdict(outcome) for outcome in outcomes], DEVICE_COLUMNS, format)


def _screen() -> Screen:
    from devices.simulated.live_table import Screen

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
            print_status(line)
            self._said_s = now_s
        else:
            return
        self._last = line
