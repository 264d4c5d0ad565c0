"""The command `edge-fl fleet up`: a simulated fleet over a real broker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edge_fl import plugins
from edge_fl.console import units
from edge_fl.console.output import Format, is_quiet, print_status, show_table
from edge_fl.console.tables import Column
from edge_fl.errors import ConfigError
from edge_fl.logs import GroupedLines
from edge_fl.options import (
    CONNECTION,
    DATA,
    DATA_DIR,
    FOLDERS,
    TRAINING,
    WAIT,
    ConnectionOptions,
    FormatOption,
    option,
)
from edge_fl_devices.options import full_worker, log_warnings, stop_on_signal

if TYPE_CHECKING:
    from edge_fl_devices.runtime.device import Device
    from edge_fl_devices.runtime.runner import Runner

FLEET_FOLDER = Path("runs/fleet")
DEVICES = 12
COLUMNS = {
    "samples": Column("samples", rank=3),
    "reports": Column("reports", rank=4),
    "before": Column("before", units.percent),
    "after": Column("after", units.percent),
    "global_test": Column("global test", units.percent),
    "bytes_down": Column("down", units.size, rank=1),
    "bytes_up": Column("up", units.size, rank=1),
    "seconds": Column("seconds", rank=2),
}
"""Columns of the result that are more than a heading."""


@dataclass(frozen=True, kw_only=True)
class FleetConnection(ConnectionOptions):
    """The broker of a simulated fleet, and its devices' identities or common login."""

    identity: Annotated[
        Path | None,
        option(
            "--identity FOLDER",
            "Identity folder: with those of all devices (edge-fl fleet enrol --baked), or their username and password [plaintext].",
            CONNECTION,
        ),
    ] = None


def up(
    devices: Annotated[
        int | None,
        option(
            "--devices N",
            f"Number of simulated devices [the sum of --head-only and --full, or {DEVICES}].",
            min=1,
        ),
    ] = None,
    head_only: Annotated[
        str, option("--head-only N", "Number of head-only devices, or their share (0.8) of --devices.")
    ] = "",
    full: Annotated[
        str, option("--full N", "Number of full devices, which train, or their share (0.2).")
    ] = "",
    heads: Annotated[
        str,
        option(
            "--heads HEADS",
            "Kinds of heads, assigned to the head-only devices in turn; auto selects one.",
            TRAINING,
        ),
    ] = "logistic,svm,mlp",
    own_labels: Annotated[
        int | None,
        option(
            "--own-labels N",
            "Labels of each head-only device, in all; 0: none, the fleet's head serves alone [all].",
            DATA,
            min=0,
        ),
    ] = None,
    dataset: Annotated[
        str, option("--dataset DATASET", "Dataset, by name; it is split over the devices.", DATA)
    ] = "digits",
    data_dir: Annotated[Path, DATA_DIR] = Path(".data"),
    settings: Annotated[
        list[str] | None,
        option(
            "--set KEY=VALUE",
            "Setting of a recipe, of its data, such as data.beta=0.1 or data.partition=iid, or seed=1; may be repeated.",
            DATA,
        ),
    ] = None,
    folder: Annotated[
        Path, option("--dir FOLDER", "Folder that contains the devices' folders.", FOLDERS)
    ] = FLEET_FOLDER,
    threads: Annotated[
        int | None, option("--threads N", "Threads that train and fit [one per processor].", min=1)
    ] = None,
    duration_s: Annotated[
        float, option("--duration SECONDS", "Stop after this many seconds; 0 runs until Ctrl-C.", min=0)
    ] = 0.0,
    until_idle: Annotated[
        bool, option("--until-idle", "Stop when the server has left or no device is busy.")
    ] = False,
    watch: Annotated[
        bool, option("--watch", "Show all devices in a table that is updated in place.")
    ] = False,
    wait_s: Annotated[float, option("--wait SECONDS", f"{WAIT}, for the broker.", CONNECTION, min=0)] = 60.0,
    faults: Annotated[
        str,
        option(
            "--faults MODULE:OBJECT",
            "Faults to inject, such as tools.chaos:lossy in a clone (docs/chaos.md).",
        ),
    ] = "",
    *,
    connection: FleetConnection,
    format: FormatOption = Format.TABLE,
) -> None:
    """Run a simulated fleet over a real broker, with the same agents as real devices."""
    from edge_fl.heads import auto
    from edge_fl.toml import apply, checked
    from edge_fl.wire.endpoint import has_login
    from edge_fl_devices.config import DeviceBroker
    from edge_fl_devices.runtime.connection import connector, fleet_connector
    from edge_fl_devices.simulated.fleet import (
        DeviceResult,
        FleetConfig,
        LiveTable,
        SimulatedData,
        run_fleet,
        tier_counts,
        unmeasured,
    )
    from edge_fl_devices.storage.store import Store

    fitting, trains = tier_counts(devices if devices or head_only or full else DEVICES, head_only, full)
    kinds = tuple(kind.strip() for kind in heads.split(","))
    auto.require_kinds(kinds, f"--heads {heads}")
    tree: dict[str, Any] = {"data": {"dataset": dataset, "data_dir": os.fspath(data_dir)}}
    apply(settings or (), tree)
    tree["data"]["clients"] = fitting + trains
    simulated = checked(tree, SimulatedData, "fleet up")
    broker = checked(connection.given(), DeviceBroker, "fleet up")
    identities = connection.identity if connection.identity and not has_login(connection.identity) else None
    if identities:
        endpoint = broker.address
        ids, connect = fleet_connector(broker.host, endpoint.port, identities, fitting + trains)
    else:
        ids, connect = (), connector(endpoint := broker.endpoint, broker.fleet)
    config = FleetConfig(
        simulated.data,
        trains,
        folder,
        fleet=broker.fleet,
        heads=kinds,
        own_labels=own_labels,
        seed=simulated.seed,
        workers=threads or os.cpu_count() or 1,
        duration_s=duration_s or float("inf"),
        until_idle=until_idle,
        wait_s=wait_s,
        ids=ids,
        identities=identities,
    )
    inject = None
    if faults:
        plugins.allow_working_folder()
        inject = plugins.imported(faults, "--faults", ConfigError)
    log_warnings(GroupedLines())
    worker = full_worker() if trains else None
    print_status(
        f"{fitting + trains} devices, {trains} of them full, on {simulated.data.dataset}; broker {endpoint}"
        f"{' with identities' if identities else ''}, fleet {broker.fleet}{f', faults {faults}' if faults else ''}"
    )
    stopped: list[Runner] = []

    def start(runner: Runner) -> None:
        stopped.append(runner)
        stop_on_signal(runner)

    draws = watch and sys.stderr.isatty() and not is_quiet()
    with Store(folder).owned(), LiveTable() if draws else nullcontext(_ProgressLine()) as show:
        results = run_fleet(config, connect, full_worker=worker, show=show, on_start=start, faults=inject)
    if stopped[0].how:
        print_status(f"{len(results)} devices: disconnected, {stopped[0].how}")
    columns = {name: name.replace("_", " ") for name in DeviceResult.__dataclass_fields__} | COLUMNS
    show_table([asdict(result) for result in results], columns, format)
    if reason := unmeasured(results):
        print_status(reason)


class _ProgressLine:
    """Shows the fleet's progress: one line updated in place on a terminal, otherwise a new line on changes, at most every EVERY_S."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._last, self._printed_s = "", 0.0

    def __call__(self, devices: Sequence[Device]) -> None:
        from edge_fl_devices.simulated.fleet import fleet_progress

        line, now_s = fleet_progress(devices), time.monotonic()
        if is_quiet() or line == self._last:
            return
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        elif now_s - self._printed_s >= self.EVERY_S:
            print_status(line)
            self._printed_s = now_s
        else:
            return
        self._last = line
