"""A fleet of simulated devices: many agents of both tiers in one process, over a real broker, with the code that real devices run.

Device i owns the data of client i of a partition. Which devices are full is drawn from the seed; the kinds of heads go round over the
head-only ones. What would be wasteful a thousand times over is shared: children that fit heads stay, an extractor that passed its
canary is not tried again. With a chaos profile links are bad, and devices crash and come back as new processes on their own folders.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from devices.agent import state
from devices.agent.state import AgentLimits
from devices.features.extractor import runtime
from devices.features.local_loader import LocalFeatureLoader
from devices.install import canary
from devices.install.trust import wall_clock
from devices.runtime import device
from devices.runtime.device import Device
from devices.runtime.interfaces import DeviceConnect
from devices.runtime.runner import Runner
from devices.simulated.chaos.injector import FaultInjector, Restart
from devices.simulated.chaos.profile import Chaos
from devices.simulated.fleet_status import DeviceOutcome, Progress, outcome, progress
from devices.storage.slots import Installed
from devices.storage.store import Store
from devices.workers.worker import MakeWorker, Worker
from devices.workers.head_fitting import ChildFitter
from devices.workers.head import HeadWorker
from edge_fl import capability
from edge_fl.capability import Tier
from edge_fl.config import DataConfig, InputSpec
from edge_fl.data import datasets
from edge_fl.data.partition import Split, split_clients
from edge_fl.data.samples import ClientData, Dataset
from edge_fl.errors import ArtefactError, ConfigError, ConnectError, ProtocolError
from edge_fl.files import descriptors
from edge_fl.seeds import generator
from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics, checked

PREFIX = "sim-"
LOOK_S = 0.25e-3  # to look at every device and say how it goes costs time, for each of them
INJECT_S = 0.25  # how often it is looked what chaos has due


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What to simulate. `data.clients` is the number of devices, `full` of them train, the others fit `heads` in turn.

    Ends after `duration_s`, or with `until_idle` once nothing is left to do and the server has gone, or nothing has happened for
    `idle_s`; it waits for a server that never came. `ids` are the devices' names, in their order, where they have certificates on them.
    """

    data: DataConfig
    full: int
    folder: Path
    fleet: str = "main"
    heads: tuple[str, ...] = ("logistic", "svm", "mlp")
    seed: int = 0
    workers: int = os.cpu_count() or 1
    duration_s: float = float("inf")
    until_idle: bool = False
    idle_s: float = 20.0
    wait_s: float = 60.0
    root: bytes | None = None
    ids: tuple[str, ...] = ()
    chaos: Chaos | None = None
    limits: AgentLimits = state.LIMITS


def run_fleet(
    config: FleetConfig,
    connect: DeviceConnect,
    *,
    full_worker: MakeWorker | None = None,
    tell: Callable[[Progress], None] | None = None,
    on_start: Callable[[Runner], None] | None = None,
    every_s: float = 0.5,
    restarts: Mapping[str, Restart] | None = None,
) -> list[DeviceOutcome]:
    """Runs the fleet to its end and says what became of each device, in order of their ids.

    `full_worker` is `devices.workers.full.FullWorker`, handed in so that a head-only fleet does without torch. `tell` hears how it goes every
    `every_s`; `on_start` gets the runner, which can be stopped; `restarts` take "broker" and "server" down where the chaos
    profile has no commands for it. Raises ConnectError when the broker cannot be reached in `wait_s`, or lets nobody in.
    """
    if config.full and full_worker is None:
        raise ConfigError(
            f"{config.full} full devices, but nothing that trains was given; expected full_worker"
        )
    try:
        topics = Topics(checked(config.fleet, "fleet"))
    except ProtocolError as error:
        raise ConfigError(str(error)) from error
    dataset = datasets.load(config.data.dataset, Path(config.data.data_dir))
    split = split_clients(dataset, config.data, config.seed)
    ids = config.ids or names(len(split.clients))
    descriptors.require(len(ids), f"a fleet of {len(ids)} devices")
    every_s = max(every_s, len(ids) * LOOK_S)
    injector = FaultInjector(config.chaos, ids, connect, restarts) if config.chaos else None
    fitter, runner = ChildFitter(keep=True), Runner(workers=config.workers)
    make = _Factory(config, topics, dataset, split, fitter, full_worker, ids, injector)
    ending = _Ending(runner, config)

    def done() -> bool:
        if injector:
            injector.advance(runner, make)
        if tell:
            tell(progress(runner.devices))
        return ending.reached() and (injector is None or injector.is_over)

    if on_start:
        on_start(runner)
    try:
        for number, name in enumerate(ids):
            runner.add(make(name), injector.connect if injector else connect)
            if number == 0:
                runner.devices[0].wait_connected(config.wait_s)
        runner.run(config.duration_s, done, min(every_s, INJECT_S) if injector else every_s)
    finally:
        fitter.close()
        if injector:
            injector.close()
    if runner.devices and all(found.denied for found in runner.devices):
        raise ConnectError(
            f"fleet {config.fleet!r}: the broker lets no device in ({runner.devices[0].denied}); the fleet stopped"
        )
    return [outcome(found) for found in sorted(runner.devices, key=lambda found: found.name)]


def names(devices: int) -> list[str]:
    """The ids of simulated devices, ascending: sim-000, sim-001, ..."""
    width = max(3, len(str(devices - 1)))
    return [f"{PREFIX}{number:0{width}d}" for number in range(devices)]


def full_devices(devices: int, full: int, seed: int) -> frozenset[int]:
    """Which of the devices are full."""
    drawn = generator(seed, "fleet.tiers").permutation(devices)[:full]
    return frozenset(int(number) for number in drawn)


def shares(devices: int | None, head: str, full: str) -> tuple[int, int]:
    """Head-only and full devices from what a person typed: whole numbers ("8"), or fractions of `devices` ("0.8"). Raises ConfigError."""
    wanted = {"head": head, "full": full}
    asked = " ".join(f"--{name} {of}" for name, of in {"devices": devices, **wanted}.items() if of)
    if devices is None:
        if any("." in text for text in wanted.values()):
            raise ConfigError(f"{asked}: a fraction needs --devices")
        counts = {name: _count(name, text or "0", 0) for name, text in wanted.items()}
    else:
        counts = {name: _count(name, text, devices) for name, text in wanted.items() if text}
        if len(counts) == 1:
            (name, count), other = next(iter(counts.items())), "full" if "head" in counts else "head"
            counts = {name: count, other: devices - count}
        counts = counts or {"head": devices, "full": 0}
    if (
        min(counts.values()) < 0
        or sum(counts.values()) < 1
        or (devices is not None and sum(counts.values()) != devices)
    ):
        raise ConfigError(
            f"{asked}: {counts['head']} head-only and {counts['full']} full, expected them to add up"
        )
    return counts["head"], counts["full"]


def _count(name: str, text: str, devices: int) -> int:
    try:
        return round(float(text) * devices) if "." in text else int(text)
    except ValueError:
        raise ConfigError(f"--{name} {text}: expected a whole number or a fraction such as 0.8") from None


class _Ending:
    """When a fleet that runs `until_idle` has nothing more to do, or nobody is let in."""

    def __init__(self, runner: Runner, config: FleetConfig) -> None:
        self._devices, self._config = runner.devices, config
        self._met_server = False
        self._busy_s = time.monotonic()

    def reached(self) -> bool:
        devices, now_s = self._devices, time.monotonic()
        if devices and all(found.denied for found in devices):
            return True
        if not self._config.until_idle:
            return False
        online = any(found.state.server_online for found in devices)
        self._met_server = self._met_server or online
        taken = any(found.acknowledged.total() for found in devices)
        waits = not taken and (online or not self._met_server)
        if waits or not all(found.is_quiet or found.denied for found in devices):
            self._busy_s = now_s
        return now_s - self._busy_s >= (1.0 if taken and not online else self._config.idle_s)


class _Factory:
    """Makes the fleet's devices, each at first and again after a crash. One process measures the machine and tries an extractor once."""

    def __init__(
        self,
        config: FleetConfig,
        topics: Topics,
        dataset: Dataset,
        split: Split,
        fitter: ChildFitter,
        full_worker: MakeWorker | None,
        ids: Sequence[str],
        injector: FaultInjector | None,
    ) -> None:
        self._config, self._topics, self._dataset, self._split = config, topics, dataset, split
        self._fitter, self._full_worker, self._injector = fitter, full_worker, injector
        self._numbers = {name: number for number, name in enumerate(ids)}
        self._full = full_devices(len(ids), config.full, config.seed)
        heads = (number for number in range(len(ids)) if number not in self._full)
        self._kinds = dict(zip(heads, cycle(config.heads), strict=False))
        self._check = _Once(canary.require)
        self._machine = capability.measure(folder=config.folder, max_opset=runtime().max_opset)

    def __call__(self, name: str) -> Device:
        number, limits = self._numbers[name], self._config.limits
        can, worker = self._capability(number), self._worker(name, number)
        return device.start(name, self._topics, can, worker, limits=limits)

    def _worker(self, name: str, number: int) -> Worker:
        store, limits = Store(self._config.folder / name), self._config.limits

        def data(classes: tuple[str, ...], input: InputSpec) -> ClientData:
            return self._split.client(self._dataset, self._split.clients[number])

        if self._full_worker and number in self._full:
            return self._full_worker(name, store, data, limits=limits)
        return HeadWorker(
            name,
            store,
            LocalFeatureLoader(data, store.folder),
            self._kinds.get(number, ""),
            self._fitter,
            runtime(),
            root=self._config.root,
            check=self._check,
            clock=self._injector.clock(name) if self._injector else wall_clock,
            limits=limits,
        )

    def _capability(self, number: int) -> Capability:
        labels = self._dataset.samples.y[self._split.train[number]]
        counts = np.bincount(labels, minlength=len(self._dataset.classes)).tolist()
        return replace(
            self._machine,
            tier=(Tier.FULL if number in self._full else Tier.HEAD).value,
            samples=sum(counts),
            samples_per_class=counts,
            head=self._kinds.get(number, ""),
            notes=["simulated"],
        )


class _Once:
    """Tries the canary of an extractor once per process; all simulated devices of a machine would get the same verdict."""

    def __init__(self, check: Callable[[Installed], None]) -> None:
        self._check = check
        self._verdicts: dict[str, ArtefactError | None] = {}
        self._lock = threading.Lock()

    def __call__(self, installed: Installed) -> None:
        sha256 = installed.manifest.extractor.sha256
        with self._lock:
            if sha256 not in self._verdicts:
                try:
                    self._check(installed)
                    self._verdicts[sha256] = None
                except ArtefactError as error:
                    self._verdicts[sha256] = error
        verdict = self._verdicts[sha256]
        if verdict:
            raise verdict
