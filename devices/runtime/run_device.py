"""One device in a process of its own: its data, its tier as measured, its worker, and its agent until somebody stops it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from msgspec.structs import replace

from devices.board.usage import Meter
from devices.child import Children
from devices.config import DeviceConfig
from devices.data.load import loader as data_loader
from devices.features.child_loader import ChildFeatureLoader
from devices.features.onnx_runtime import Runtime
from devices.install import canary
from devices.install.mirror import Mirror
from devices.install.precision import PrecisionLimits
from devices.runtime import device
from devices.runtime.device import Device
from devices.runtime.interfaces import DeviceConnect
from devices.runtime.runner import Runner
from devices.runtime.monitor import DeviceMonitor, inspector
from devices.storage.slots import Installed
from devices.storage.store import Store
from devices.workers.worker import MakeWorker, Worker
from devices.workers.head_and_full import HeadAndFullWorker
from devices.workers.head_fitting import ChildFitter
from devices.workers.head import HeadWorker
from edge_fl import capability
from edge_fl.capability import Tier
from edge_fl.console.progress import Count, unwatched
from edge_fl.console.progress import Watch as Tell
from edge_fl.errors import ConfigError, ConnectError
from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics

TRY_S = 15.0
Say = Callable[[str], None]


def run_device(
    config: DeviceConfig,
    connect: DeviceConnect,
    runner: Runner,
    children: Children,
    full_worker: Callable[[], MakeWorker],
    say: Say,
    tick: Callable[[], None] = lambda: None,
    tell: Tell = unwatched,
) -> None:
    """Runs the device until `runner` is stopped. `children` compute its features, one of them best started before this is loaded.
    `full_worker` is asked for only when the tier is full, because torch comes with it.
    `tick` is called every so often: what renews the certificate. `tell` hears how much of a transfer is here.

    Raises InputError when the settings, the data or the folder cannot be used, ConnectError when the broker refuses this device.
    """
    store = Store(Path(config.folder))
    with store.owned():
        loader = ChildFeatureLoader(config, children)
        can = measure(config, loader, say)
        alive = device.start(
            config.id,
            Topics(config.broker.fleet),
            can,
            _worker(config, can, store, loader, children, full_worker),
        )
        say(
            f"{config.id}: {can.notes[0]}; {can.samples} samples to train on; broker {config.broker.endpoint}"
        )
        runner.add(alive, connect)
        threading.Thread(target=_wait, args=(alive, runner, say), daemon=True).start()
        teller = _Teller(alive, say, tell)

        def done() -> bool:
            tick()
            return teller()

        stopped = threading.Event()
        if config.watch_s:
            monitor = DeviceMonitor(
                config,
                alive,
                lambda event: runner.deliver(alive, event),
                Meter(store.folder, lambda: alive.totals["wire_bytes"], watts=config.budget.watts),
                inspect=inspector(config, alive, loader),
            )
            threading.Thread(target=watch.run, args=(stopped,), daemon=True).start()
        try:
            runner.run(done=done)
        finally:
            stopped.set()
    if alive.denied:
        raise ConnectError(
            f"{config.id}: broker {config.broker.endpoint} refuses this device ({alive.denied}); stopped"
        )


def measure(config: DeviceConfig, loader: ChildFeatureLoader, say: Say) -> Capability:
    """What this machine and its data allow. Raises DataError when the source cannot be read at all."""
    limit = None if config.tier == "auto" else Tier(config.tier)
    found = loader.inspect()
    if found.trouble:
        say(f"{config.id}: {found.trouble}")
    counts = found.report.samples_per_class if found.report else ()
    can = capability.measure(
        folder=Path(config.folder),
        samples_per_class=counts,
        head=config.head,
        limit=limit,
        onnxruntime=found.runtime.version,
        max_opset=found.runtime.max_opset,
        gflops=found.speed.gflops,
        torch_s=found.speed.torch_s,
    )
    if config.tier == "full" and can.tier != "full":
        raise ConfigError(
            f"tier full: not on this machine ({can.notes[0]}); expected torch and enough memory"
        )
    return replace(can, notes=[*can.notes, *found.notes])


def _worker(
    config: DeviceConfig,
    can: Capability,
    store: Store,
    loader: ChildFeatureLoader,
    children: Children,
    full_worker: Callable[[], MakeWorker],
) -> Worker:
    root = _read_root(Path(config.root)) if config.root else None
    runtime = Runtime(can.onnxruntime, can.max_opset)
    head = HeadWorker(
        config.id,
        store,
        loader,
        config.head,
        ChildFitter(),
        runtime,
        root=root,
        share=config.uploads,
        balanced=config.balanced,
        guard=config.guard,
        budget_s=config.head_budget_s,
        check=partial(_check, children),
        precision=PrecisionLimits(config.precision, capability.total_memory_mb(), config.latency_ms),
        mirror=Mirror(config.mirror) if config.mirror else None,
    )
    if can.tier != "full":
        return head
    # read once: a full device trains on its images again and again
    own = lru_cache(1)(data_loader(config))
    return HeadAndFullWorker(
        full_worker()(config.id, store, own, threads=config.threads, epsilon=config.epsilon), head
    )


def _check(children: Children, installed: Installed) -> None:
    """The canary, while the child that computes features with the extractor next loads already. Raises as `canary.require`."""
    children.start()
    canary.require(installed)


def _read_root(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected the root of signed releases"
        ) from error


def _wait(device: Device, runner: Runner, say: Say) -> None:
    """Says, until the broker is there, that it is not."""
    while True:
        try:
            device.wait_connected(TRY_S)
        except ConnectError as error:
            if device.denied or device.state.status == "disconnected":
                return
            say(f"{error}; trying again")
        else:
            return


class _Teller:
    """Says each new status, how far a transfer is, and when to end: when the broker refuses the device for good."""

    def __init__(self, device: Device, say: Say, tell: Tell) -> None:
        self._device, self._say, self._tell = device, say, tell
        self._said = ""
        self._fetching: Count | None = None

    def __call__(self) -> bool:
        was, self._fetching = self._fetching, self._device.fetching
        if was and (self._fetching is None or self._fetching.stage != was.stage):
            self._tell(was._replace(done=was.of))
        if self._fetching:
            self._tell(self._fetching)
        at = self._device.state
        if at.said:
            status, activity, release, why = at.said
            line = (
                f"{at.device}: {status}, {activity}"
                + (f", release {release}" if release else "")
                + (f" ({why})" if why else "")
            )
            if line != self._said:
                self._say(line)
                self._said = line
        return bool(self._device.denied)
