"""Assemble and run one real device in its own process: data, measured tier, worker, agent and monitor."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from pathlib import Path

from msgspec.structs import replace

from edge_fl import capability as capabilities
from edge_fl.capability import Tier
from edge_fl.console.progress import Count, Progress
from edge_fl.errors import ConfigError, ConnectError
from edge_fl.wire import identity
from edge_fl.wire.identity import CERT_FILE, Identity
from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics
from edge_fl_devices.agent.events import DataChanged
from edge_fl_devices.board.memory import return_freed_blocks
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.child import Children
from edge_fl_devices.config import DeviceConfig, read_root, remember
from edge_fl_devices.features.child_loader import ChildFeatureLoader
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.install import canary
from edge_fl_devices.install.mirror import Mirror
from edge_fl_devices.install.precision import PrecisionLimits
from edge_fl_devices.remote.answering import Responder
from edge_fl_devices.remote.log_file import LogFile, private_paths, recording
from edge_fl_devices.remote.settings import RemoteSettings
from edge_fl_devices.runtime import device
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.interfaces import DeviceConnect
from edge_fl_devices.runtime.monitor import DeviceMonitor, inspector
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.runtime.updating import updating
from edge_fl_devices.storage.slots import Installed
from edge_fl_devices.storage.store import Answers, Store
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import ChildFitter
from edge_fl_devices.workers.worker import MakeWorker

log = logging.getLogger(__name__)

CONNECT_S = 15.0


def run_device(
    settings: RemoteSettings,
    connect: DeviceConnect,
    runner: Runner,
    children: Children,
    full_worker: Callable[[], MakeWorker],
    progress: Progress,
    tick: Callable[[], None] = lambda: None,
) -> int:
    """Run the device until `runner` is stopped or continues with other settings -> the exit code: RESTART if another version of the
    agent should start.

    children: a pool that computes features. full_worker: called only for the full tier, because it imports torch. progress: shows
    status lines and downloads. tick: called periodically, for the renewal of the certificate.
    Raises InputError for unusable settings, data or folder, ConnectError if the broker denies access.
    """
    config = settings.config
    store = Store(Path(config.folder))
    with ExitStack() as stack:
        stack.enter_context(store.owned())
        file = LogFile(store.folder, config.id, private_paths(config))
        stack.enter_context(recording(file))
        if (answers := Answers(config.min_precision, config.false_alarm)) != store.answers():
            store.keep_answers(answers)
        with suppress(OSError):  # only `device serve` misses them
            remember(config)
        loader = ChildFeatureLoader(config, children)
        capability, data_problem = measure(config, loader, progress.print)
        worker = _make_head_worker(config, capability, store, loader, children)
        if capability.tier == "full":
            from edge_fl_devices.data.load import loader as data_loader

            load_data = lru_cache(1)(data_loader(config))  # a full device trains on its images repeatedly
            make = full_worker()
            worker.full = make(config.id, store, load_data, threads=config.threads, epsilon=config.epsilon)
        else:
            return_freed_blocks()  # torch would allocate more slowly
        topics = Topics(config.broker.fleet)
        certificate = identity.certificate_in(config.broker.identity)
        until = _certificate_until(certificate)
        capability = replace(capability, certificate_until=until, settings=settings.status)
        agent = device.start(
            config.id,
            topics,
            capability,
            worker,
            data_problem=data_problem,
            identity=certificate.folder if certificate else None,
        )
        log.info("%s: agent %s started", config.id, capability.agent)
        agent.answer_query = Responder(config, file, agent.identity).receive
        agent.take_settings = settings.receive
        update = stack.enter_context(updating(config, agent, runner, worker.trust))
        progress.print(
            f"{config.id}: {capability.notes[0]}; {capability.samples} samples to train on; broker {config.broker.endpoint}"
        )
        runner.add(agent, update.through(connect))
        threading.Thread(target=_wait_connected, args=(agent, progress.print), daemon=True).start()
        status = _StatusDisplay(agent, progress)

        def done() -> bool:
            tick()
            status.update()
            known = agent.state.capability
            if (until := _certificate_until(certificate)) != known.certificate_until:  # renewed
                changed = replace(known, certificate_until=until)
                runner.deliver(agent, DataChanged(changed, agent.state.data_problem, refit=False))
            settings.observe(agent.state.connected, bool(agent.denied), time.monotonic())
            denied = bool(agent.denied)
            runner.continues = settings.restart_due and (denied or agent.state.work is None)
            return runner.continues or denied

        stopped = threading.Event()
        if config.watch_s:
            monitor = DeviceMonitor(
                config,
                agent,
                partial(runner.deliver, agent),
                Meter(store.folder, lambda: agent.totals["wire_bytes"], watts=config.budget.watts),
                inspect=inspector(config, agent, loader),
            )
            threading.Thread(target=monitor.run, args=(stopped,), daemon=True).start()
        try:
            runner.run(done=done)
        finally:
            stopped.set()
    if agent.denied and not runner.continues:
        raise ConnectError(
            f"{config.id}: broker {config.broker.endpoint} denies access to this device ({agent.denied})",
            consequence="stopped",
        )
    return update.exit_code


def measure(
    config: DeviceConfig, loader: ChildFeatureLoader, show: Callable[[str], None]
) -> tuple[Capability, str]:
    """Measure what this machine can do and count its data; the second value is "out_of_memory" if that ran out of memory.

    Raises DataError if the source cannot be read at all.
    """
    inspection = loader.inspect()
    for line in filter(
        None, [inspection.trouble, *(inspection.report.local_notes if inspection.report else [])]
    ):
        show(f"{config.id}: {line}")
    capability = capabilities.measure(
        folder=Path(config.folder),
        samples_per_class=inspection.report.samples_per_class if inspection.report else (),
        head=config.head,
        limit=None if config.tier == "auto" else Tier(config.tier),
        onnxruntime=inspection.runtime.version,
        max_opset=inspection.runtime.max_opset,
        gflops=inspection.speed.gflops,
        torch_s=inspection.speed.torch_s,
    )
    if config.tier == "full" and capability.tier != "full":
        raise ConfigError(
            f"tier full: not on this machine ({capability.notes[0]}); expected torch and enough memory"
        )
    capability = replace(capability, notes=[*capability.notes, *inspection.notes])
    return capability, "out_of_memory" if inspection.out_of_memory else ""


def _certificate_until(certificate: Identity | None) -> int:
    """When the current certificate of this identity ends, in seconds since 1970; 0 without one."""
    if certificate is None:
        return 0
    return _expiry(certificate.folder, (certificate.folder / CERT_FILE).stat().st_mtime_ns)


@lru_cache(1)
def _expiry(folder: Path, written_ns: int) -> int:
    return int(identity.read(folder).expires.timestamp())


def _make_head_worker(
    config: DeviceConfig, capability: Capability, store: Store, loader: ChildFeatureLoader, children: Children
) -> HeadWorker:
    def check(installed: Installed) -> None:
        """Run the canary, while a child for the features starts in parallel."""
        children.start()
        canary.require(installed)

    return HeadWorker(
        config.id,
        store,
        loader=loader,
        fitter=ChildFitter(),
        runtime=Runtime(capability.onnxruntime, capability.max_opset),
        kind=config.head,
        balanced=config.balanced,
        budget_s=config.head_budget_s,
        calibrate=True,
        cross_validate_below=config.cross_validate_below if config.reads_folder else 0,
        share=config.uploads,
        guard=config.guard,
        root=read_root(Path(config.root)) if config.root else None,
        check=check,
        precision=PrecisionLimits(config.precision, capabilities.total_memory_mb(), config.latency_ms),
        mirror=Mirror(config.mirror) if config.mirror else None,
    )


def _wait_connected(agent: Device, show: Callable[[str], None]) -> None:
    """Report every CONNECT_S that the broker cannot be reached, until it is."""
    while True:
        try:
            agent.wait_connected(CONNECT_S)
        except ConnectError as error:
            if agent.denied or agent.state.status == "disconnected":
                return
            show(f"{error}; trying again")
        else:
            return


class _StatusDisplay:
    """Prints each new status and shows the progress of downloads."""

    def __init__(self, agent: Device, progress: Progress) -> None:
        self._agent, self._progress = agent, progress
        self._line = ""
        self._fetching: Count | None = None

    def update(self) -> None:
        """Show what has changed."""
        before, self._fetching = self._fetching, self._agent.fetching
        if before and (self._fetching is None or self._fetching.stage != before.stage):
            self._progress(before._replace(done=before.of))
        if self._fetching:
            self._progress(self._fetching)
        if self._agent.state.published is None:
            return
        status, activity, release, why = self._agent.state.published
        line = f"{self._agent.name}: {status}, {activity}"
        line += (f", release {release}" if release else "") + (f" ({why})" if why else "")
        if line != self._line:
            self._progress.print(line)
            self._line = line
