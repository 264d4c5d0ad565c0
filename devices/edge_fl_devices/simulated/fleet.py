"""Run a fleet of simulated devices: many agents of both tiers in one process, over a real broker, with the code of real devices.

Device i owns the data of client i of a partition. The full devices are drawn from the seed; the head-only ones use the kinds of heads in
turn. Faults may be added from outside: bad connections, wrong clocks, and crashes after which devices restart on their own folders. The
progress is shown in one line or as a table that is updated in place; at the end there is a result of each device.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from edge_fl import metrics, process_limits
from edge_fl.console.tables import Table, fitted
from edge_fl.console.units import percent
from edge_fl.data import datasets
from edge_fl.data.partition import DataConfig, split_clients
from edge_fl.data.samples import ClientData
from edge_fl.errors import ArtefactError, ConfigError, ConnectError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.fleet.simulated import full_devices, names
from edge_fl.inputs import InputSpec
from edge_fl.seeds import generator
from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics, checked
from edge_fl.wire.transport import Connect, Listener, Packet, Transport
from edge_fl_devices.agent import state
from edge_fl_devices.agent.state import CALM, AgentLimits
from edge_fl_devices.board import capabilities
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install import canary
from edge_fl_devices.install.trust import Trust, wall_clock
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.slots import InstalledRelease
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import ChildFitter
from edge_fl_devices.workers.worker import MakeWorker, Worker

HEADINGS = ("device", "tier", "activity", "release", "head", "before", "after", "reports", "why")
NUMERIC = ("release", "before", "after", "reports")
RANKS = {"head": 3, "reports": 2, "before": 1}
OTHER_LINES = 7  # terminal lines for the title, headings and caption
MIN_ROWS = 5
Clock = Callable[[], datetime]
"""Returns the wall clock of a device."""
CHECK_S = 0.25e-3  # time per device to check the end condition and to show the progress
INJECT_S = 0.25  # interval at which faults are injected


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """Result of one device: accuracies of its last reports (None: not measured), bytes and seconds summed over all reports."""

    device: str
    tier: str
    head: str
    samples: int
    release: int
    reports: int
    accepted: int
    before: float | None
    after: float | None
    global_test: float | None
    bytes_down: int
    bytes_up: int
    seconds: float
    why: str

    @property
    def accuracy(self) -> float | None:
        """An accuracy that it reported; None if it reported none."""
        return next(
            (value for value in (self.after, self.before, self.global_test) if value is not None), None
        )


def fleet_progress(devices: Sequence[Device]) -> str:
    """Describe the fleet in one line: connections, devices by activity, heads, and reports accepted by the server."""
    states = [device.state for device in devices]
    connected, serving = sum(state.connected for state in states), sum(state.release > 0 for state in states)
    activities = Counter(state.activity for state in states if state.activity != "idle")
    busy = ", ".join(f"{count} {name}" for name, count in sorted(activities.items()))
    online = any(state.server_online for state in states)
    accepted = sum(device.reporting.acknowledged["accepted"] for device in devices)
    alerts = sum(bool(state.why) and state.why not in CALM for state in states)
    return (
        f"{connected}/{len(devices)} connected · {'server online' if online else 'waiting for the server'} · "
        f"{busy or 'idle'} · {serving} serving a head · {accepted} reports accepted"
        f"{f' · {alerts} alerts' if alerts else ''}"
    )


def device_result(device: Device) -> DeviceResult:
    """Collect the result of one device."""
    reports, values = device.reporting.last, {}
    for kind in ("evaluation", "personal", "head"):
        values.update(reports[kind].metrics if kind in reports else {})
    why = "" if device.state.why == Failure.SHUT_DOWN else device.state.why  # it was asked to end
    return DeviceResult(
        device=device.name,
        tier=device.state.tier.value,
        head=reports["head"].head if "head" in reports else "",
        samples=device.state.capability.samples,
        release=device.state.release,
        reports=device.reporting.totals["reports"],
        accepted=device.reporting.acknowledged["accepted"],
        before=values.get(metrics.PERSONAL_BEFORE),
        after=values.get(metrics.PERSONAL_AFTER),
        global_test=values.get(metrics.GLOBAL_TEST),
        bytes_down=device.reporting.totals["bytes_down"],
        bytes_up=device.reporting.totals["bytes_up"],
        seconds=device.reporting.totals["milliseconds"] / 1000,
        why=why or next((report.error for report in reports.values() if report.error), ""),
    )


def unmeasured(results: Sequence[DeviceResult]) -> str:
    """Why no full device could evaluate or personalise; "" where one could, or where not all that reported have failed."""
    full = [result for result in results if result.tier == Tier.FULL.value and result.reports]
    if not full or not all(result.why and result.accuracy is None for result in full):
        return ""
    return (
        f"no full device could evaluate or personalise: {', '.join(sorted({result.why for result in full}))}"
    )


def table_rows(devices: Sequence[Device], at_most: int) -> list[tuple[str, ...]]:
    """Return the first rows: failed devices, then busy ones, then by name."""
    ranked = sorted(devices, key=lambda one: (not one.state.why, one.state.activity == "idle", one.name))
    return [_row(device) for device in ranked[:at_most]]


class LiveTable:
    """Context manager; call it with the devices to redraw the table."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, devices: Sequence[Device]) -> None:
        shown = max(self._console.height - OTHER_LINES, MIN_ROWS)
        more = [f"and {len(devices) - shown} more"] if len(devices) > shown else []
        table = Table(HEADINGS, table_rows(devices, shown), numeric=NUMERIC, ranks=RANKS)
        lines = [fleet_progress(devices), "", *fitted(table, self._console.width, stacked=False), *more]
        self._live.update(self._text("\n".join(lines), no_wrap=True), refresh=True)


def _row(device: Device) -> tuple[str, ...]:
    result, state = device_result(device), device.state
    activity = state.activity if state.connected else "away"
    release = str(result.release) if result.release else "-"
    numbers = (percent(result.before), percent(result.after), str(result.accepted))
    return (result.device, result.tier, activity, release, result.head or "-", *numbers, result.why)


class SimulatedData(Struct, frozen=True, forbid_unknown_fields=True):
    """The data of a simulated fleet, and the seed of their split and of the selection of full devices; keys as in a recipe."""

    data: DataConfig = DataConfig()
    seed: Annotated[int, Meta(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`data.clients` devices, of which `full` train; the others fit the kinds of `heads` in turn.

    The fleet stops after `duration_s`. With `until_idle` it also stops when nothing is left to do and the server has gone, or when nothing
    has happened for `idle_s`; it does not stop before a server has been online. `ids` are the device names, for fleets with certificates,
    which are in folders of these names below `identities`. `own_labels`: training samples of a head-only device, in a random order (None:
    all).
    """

    data: DataConfig
    full: int
    folder: Path
    fleet: str = "main"
    heads: tuple[str, ...] = ("logistic", "svm", "mlp")
    own_labels: int | None = None
    seed: int = 0
    workers: int = os.cpu_count() or 1
    duration_s: float = float("inf")
    until_idle: bool = False
    idle_s: float = 20.0
    wait_s: float = 60.0
    root: bytes | None = None
    ids: tuple[str, ...] = ()
    identities: Path | None = None
    limits: AgentLimits = state.LIMITS


def tier_counts(devices: int | None, head_only: str, full: str) -> tuple[int, int]:
    """Return (head-only, full) devices from options: whole numbers ("8") or fractions of `devices` ("0.8"). Raises ConfigError."""
    texts = {"head-only": head_only, "full": full}
    given = " ".join(f"--{name} {value}" for name, value in {"devices": devices, **texts}.items() if value)
    if devices is None and any("." in text for text in texts.values()):
        raise ConfigError(f"{given}: a fraction needs --devices")
    counts = {name: _count(name, text, devices or 0) for name, text in texts.items() if text}
    total = sum(counts.values()) if devices is None else devices
    heads = counts.get("head-only", total - counts.get("full", 0))
    fulls = counts.get("full", total - heads)
    if min(heads, fulls) < 0 or not 1 <= heads + fulls == total:
        raise ConfigError(f"{given}: {heads} head-only and {fulls} full, expected them to add up")
    return heads, fulls


def _count(name: str, text: str, devices: int) -> int:
    try:
        return round(float(text) * devices) if "." in text else int(text)
    except ValueError:
        raise ConfigError(f"--{name} {text}: expected a whole number or a fraction such as 0.8") from None


class DeviceFactory:
    """Makes a device by its name; call it again to restart the device on its folder.

    The devices share what is the same for all of them: the machine's measured capability, the child processes that fit heads, and the
    verdict on an extractor. Raises ConfigError for an invalid fleet name.
    """

    def __init__(self, config: FleetConfig, fitter: ChildFitter, full_worker: MakeWorker | None) -> None:
        try:
            self._topics = Topics(checked(config.fleet, "fleet"))
        except ProtocolError as error:
            raise ConfigError(error.message) from error
        self._config, self._fitter, self._full_worker = config, fitter, full_worker
        self._dataset = datasets.load(config.data.dataset, Path(config.data.data_dir))
        self._split = split_clients(self._dataset, config.data, config.seed)
        if (clients := len(self._split.clients)) != config.data.clients:
            raise ConfigError(
                f"{config.data.split}: {clients} clients for {config.data.clients} devices; expected --devices {clients}"
            )
        self.names = config.ids or names(len(self._split.clients))
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._full = full_devices(len(self.names), config.full, config.seed)
        heads = (number for number in range(len(self.names)) if number not in self._full)
        self._kinds = dict(zip(heads, cycle(config.heads), strict=False))
        self._check = _CheckOnce()
        self._machine = capabilities.measure(folder=config.folder, max_opset=runtime().max_opset)

    def __call__(self, name: str, clock: Clock = wall_clock) -> Device:
        number, config = self._numbers[name], self._config
        return Device(
            name,
            self._topics,
            self._capability(number),
            self._worker(name, number, clock),
            limits=config.limits,
            identity=config.identities / name if config.identities else None,
        )

    def _worker(self, name: str, number: int, clock: Clock) -> Worker:
        store, limits = Store(self._config.folder / name), self._config.limits

        def data(classes: tuple[str, ...], input: InputSpec) -> ClientData:
            return self._data(number)

        root = self._config.root
        trust = Trust(store.folder / "tuf", root, trust_on_first_use=root is None, clock=clock)
        # without certificates a signature by a root of first use proves nothing
        verifies = bool(root or self._config.identities)
        if self._full_worker and number in self._full:
            return self._full_worker(name, store, data, limits=limits, verifies=trust if verifies else None)
        return HeadWorker(
            name,
            store,
            FitSettings(self._kinds.get(number, "")),
            loader=LocalFeatureLoader(data, store.folder),
            fitter=self._fitter,
            runtime=runtime,
            trust=trust,
            verifies=verifies,
            check=self._check,
            limits=limits,
        )

    def _data(self, number: int) -> ClientData:
        """The data of a device; a head-only one has `own_labels` training samples, the first ones of a fixed random order."""
        data, most = self._split.client(self._dataset, self._split.clients[number]), self._config.own_labels
        if most is None or number in self._full:
            return data
        order = generator(self._config.seed, "fleet.labels", client=str(number)).permutation(len(data.train))
        return ClientData(data.train.take(order[:most]), data.validation, data.test)

    def _capability(self, number: int) -> Capability:
        labels = self._dataset.samples.y[self._split.train[number]]
        if self._config.own_labels is not None:
            labels = self._data(number).train.y
        counts = np.bincount(labels, minlength=len(self._dataset.classes)).tolist()
        return replace(
            self._machine,
            tier=(Tier.FULL if number in self._full else Tier.HEAD).value,
            samples=sum(counts),
            samples_per_class=counts,
            head=self._kinds.get(number, ""),
            notes=["simulated"],
        )


class _CheckOnce:
    """Runs an extractor's canary once per process: all simulated devices would get the same verdict."""

    def __init__(self) -> None:
        self._verdicts: dict[str, ArtefactError | None] = {}
        self._lock = threading.Lock()

    def __call__(self, installed: InstalledRelease) -> None:
        sha256 = installed.manifest.extractor.sha256
        with self._lock:
            if sha256 not in self._verdicts:
                try:
                    canary.require(installed)
                    self._verdicts[sha256] = None
                except ArtefactError as error:
                    self._verdicts[sha256] = error
        if verdict := self._verdicts[sha256]:
            raise verdict


class Faults(Protocol):
    """Faults of a fleet: they wrap its connections, change its clocks, and act on its devices (`tools.chaos.injector`)."""

    @property
    def is_over(self) -> bool: ...
    def connect(self, client_id: str, will: Packet | None, deliver: Listener, /) -> Transport: ...
    def clock(self, name: str) -> Callable[[], datetime]: ...
    def advance(self, runner: Runner, make: Callable[[str], Device]) -> None: ...
    def close(self) -> None: ...


def run_fleet(
    config: FleetConfig,
    connect: Connect,
    *,
    full_worker: MakeWorker | None = None,
    show: Callable[[Sequence[Device]], None] = lambda devices: None,
    on_start: Callable[[Runner], None] = lambda runner: None,
    every_s: float = 0.5,
    faults: Callable[[Sequence[str], Connect], Faults] | None = None,
) -> list[DeviceResult]:
    """Run the fleet until it ends; return the devices' results, sorted by name.

    `full_worker` is `workers.full.FullWorker`, a parameter so that head-only fleets do not import torch. `show` is called with the
    devices every `every_s`, `on_start` with the runner, which can be stopped, `faults` with the devices' names and `connect`.
    Raises ConnectError when the broker is not reached within `wait_s` or denies access.
    """
    if config.full and full_worker is None:
        raise ConfigError(f"{config.full} full devices, but no worker that trains; expected full_worker")
    fitter, runner = ChildFitter(keep=True), Runner(workers=config.workers)
    factory = DeviceFactory(config, fitter, full_worker)
    names = factory.names
    process_limits.require_sockets(len(names), f"a fleet of {len(names)} devices")
    every_s = max(every_s, len(names) * CHECK_S)
    injector = faults(names, connect) if faults else None
    if injector:
        connect, every_s = injector.connect, min(every_s, INJECT_S)
    end = _EndCondition(runner, config)

    def make(name: str) -> Device:
        return factory(name, injector.clock(name)) if injector else factory(name)

    def done() -> bool:
        if injector:
            injector.advance(runner, make)
        show(runner.devices)
        return end.reached() and (injector is None or injector.is_over)

    on_start(runner)
    try:
        for number, name in enumerate(names):
            runner.add(make(name), connect)
            if number == 0:
                runner.devices[0].connection.wait(config.wait_s)
        runner.run(config.duration_s, done, every_s)
    finally:
        fitter.close()
        if injector:
            injector.close()
    if runner.devices and all(device.denied for device in runner.devices):
        raise ConnectError(
            f"fleet {config.fleet!r}: the broker denies access to every device ({runner.devices[0].denied})",
            consequence="the fleet stopped",
        )
    return [device_result(device) for device in sorted(runner.devices, key=lambda device: device.name)]


class _EndCondition:
    """Detects that a fleet with `until_idle` has nothing left to do, or that the broker denies access to all devices."""

    def __init__(self, runner: Runner, config: FleetConfig) -> None:
        self._devices, self._config = runner.devices, config
        self._server_seen = False
        self._busy_s = time.monotonic()

    def reached(self) -> bool:
        devices, now_s = self._devices, time.monotonic()
        if devices and all(device.denied for device in devices):
            return True
        if not self._config.until_idle:
            return False
        online = any(device.state.server_online for device in devices)
        self._server_seen = self._server_seen or online
        acknowledged = any(device.reporting.acknowledged.total() for device in devices)
        waiting = not acknowledged and (online or not self._server_seen)
        if waiting or not all(device.is_quiet or device.denied for device in devices):
            self._busy_s = now_s
        return now_s - self._busy_s >= (1.0 if acknowledged and not online else self._config.idle_s)
