"""Assemble and run one real device in its own process: data, measured tier, worker, agent and monitor."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from edge_fl import threads
from edge_fl.console.progress import Count, Progress
from edge_fl.errors import ArtefactError, ConfigError, ConnectError, EdgeFLError
from edge_fl.fields import Tier
from edge_fl.files import disk
from edge_fl.memory import total_memory_mb
from edge_fl.wire import identity
from edge_fl.wire.identity import CERT_FILE, Identity
from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics
from edge_fl_devices.agent.events import DataChanged
from edge_fl_devices.board import capability as capabilities
from edge_fl_devices.board.memory import return_freed_blocks
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.child import Children
from edge_fl_devices.config import DeviceConfig, read_root, remember
from edge_fl_devices.data import record
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.features.child_loader import ChildFeatureLoader, Inspection
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.features.progress import ReadingProgress
from edge_fl_devices.install import canary
from edge_fl_devices.install.mirror import Mirror
from edge_fl_devices.install.precision import PrecisionLimits
from edge_fl_devices.remote.answering import Responder
from edge_fl_devices.remote.log_file import LogFile, private_paths, recording
from edge_fl_devices.remote.settings import RemoteSettings
from edge_fl_devices.runtime import device
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.inspector import Inspector
from edge_fl_devices.runtime.interfaces import DeviceConnect
from edge_fl_devices.runtime.monitor import COUNTING, DeviceMonitor, counted
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.runtime.updating import updating
from edge_fl_devices.storage.slots import Installed
from edge_fl_devices.storage.store import Answers, Store
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import ChildFitter
from edge_fl_devices.workers.worker import MakeWorker

log = logging.getLogger(__name__)

CONNECT_S = 15.0
ROOM_S = 10.0  # between looks at a full disk
START_BYTES = 64 * 1024  # memory, settings and state, and some room
READING_S = 60.0  # between lines about a slow reading of the pictures
UNKNOWN_OPSET = 99  # of a board that is not measured: the canary tells what it runs


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
        if not _has_room(store, runner, lambda line: progress.print(f"{config.id}: {line}")):
            return 0
        if (answers := Answers(config.min_precision, config.false_alarm)) != store.answers():
            store.keep_answers(answers)
        with suppress(OSError):  # only `device serve` misses them
            remember(config)
        current = CurrentData(config)
        loader = ChildFeatureLoader(config, children, current)
        runner.end_work = children.end
        board, problem = inspect_board(config, loader)
        capability = as_counted_last(config, measured(config, board))
        worker = _make_head_worker(config, capability, store, loader, children)
        worker.data_stamp = current.stamp

        def use_tier(capability: Capability) -> None:
            """Make the worker that trains, on a board that can train."""
            if capability.tier == "full" and worker.full is None:
                make = full_worker()
                worker.full = make(config.id, store, current, threads=config.threads, epsilon=config.epsilon)
            elif capability.tier != "full":
                return_freed_blocks()  # torch would allocate more slowly

        use_tier(capability)
        topics = Topics(config.broker.fleet)
        certificate = identity.certificate_in(config.broker.identity)
        expiry = CertificateExpiry(certificate)
        capability = replace(capability, certificate_until=expiry.end(), settings=settings.status)
        agent = device.start(
            config.id,
            topics,
            capability,
            worker,
            data_problem=problem,
            identity=certificate.folder if certificate else None,
            sum_floors=config.sums,
        )
        log.info("%s: agent %s started", config.id, capability.agent)
        agent.answer_query = Responder(config, file, agent.identity).receive
        agent.take_settings = settings.receive
        update = stack.enter_context(updating(config, agent, runner, worker.trust))
        progress.print(f"{config.id}: {capability.notes[0]}; {COUNTING}; broker {config.broker.endpoint}")
        runner.add(agent, update.through(connect))
        threads.once(partial(_wait_connected, agent, progress.print), "edge-fl-connecting").start()
        status = _StatusDisplay(agent, progress, loader.progress)

        def done() -> bool:
            tick()
            status.update()
            known = agent.state.capability
            if (until := expiry.end()) != known.certificate_until:  # renewed
                changed = replace(known, certificate_until=until)
                runner.deliver(agent, DataChanged(changed, agent.state.data_problem, refit=False))
            settings.observe(agent.state.connected, bool(agent.denied), time.monotonic())
            denied = bool(agent.denied)
            runner.continues = settings.restart_due and (denied or agent.state.work is None)
            return runner.continues or denied

        def take_count(report: DataReport) -> None:
            """Announce the count of what a round trains on before its update: the server rejects one on more samples."""
            found = counted(agent.state.capability, report)
            if found != agent.state.capability:
                runner.deliver(agent, DataChanged(found, refit=False))

        def measure_again(board: Inspection) -> Capability:
            """Take the measurements of a board that could not be measured at the start."""
            capability = measured(config, board)
            worker.runtime = board.runtime
            use_tier(capability)
            return capability

        def watch() -> None:
            """Count the data and watch them: what takes longer with every picture must not delay that the agent is ready."""
            runner.ready.wait()
            monitor.run(stopped)

        current.counted = take_count
        stopped = threading.Event()
        monitor = DeviceMonitor(
            config,
            agent,
            partial(runner.deliver, agent),
            Meter(store.folder, lambda: agent.totals["wire_bytes"], watts=config.budget.watts),
            Inspector(config, agent, loader, measure_again, progress.print),
            current,
        )
        threads.lasting(watch, "edge-fl-monitor", stopped=stopped).start()
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


def _has_room(store: Store, runner: Runner, show: Callable[[str], None]) -> bool:
    """Wait until the disk takes what a start writes; False if the runner was stopped.

    An agent that ended for want of space would count as one that crashes at its start, and lose its version to an older one.
    """
    while not runner.stopped:
        try:
            disk.require_space(store.folder, START_BYTES, "start")
        except ArtefactError as error:
            show(f"{error.message}; trying again every {ROOM_S:g} s")
            runner.wait(ROOM_S)
        else:
            return True
    return False


def inspect_board(config: DeviceConfig, loader: ChildFeatureLoader) -> tuple[Inspection | None, str]:
    """Measure the board in a child, without its data: what takes longer with every picture would delay the start.

    Returns None and a failure word if the child failed; the monitor tries again.
    """
    try:
        return loader.inspect_board(), ""
    except (EdgeFLError, MemoryError) as error:
        log.warning("%s: the board was not measured: %s; head-only until it is", config.id, error)
        return None, record.failure_word(error)


def measured(config: DeviceConfig, board: Inspection | None) -> Capability:
    """Return what this machine can do; a board that could not be measured is head-only until then.

    Raises ConfigError if its owner demands more than it can do.
    """
    limit = None if config.tier == "auto" else Tier(config.tier)
    if board is None:
        found = capabilities.measure(folder=Path(config.folder), head=config.head, limit=Tier.HEAD)
        return replace(found, notes=["head: the board is not measured yet", "not measured"])
    capability = capabilities.measure(
        folder=Path(config.folder),
        head=config.head,
        limit=limit,
        onnxruntime=board.runtime.version,
        max_opset=board.runtime.max_opset,
        gflops=board.speed.gflops,
        torch_s=board.speed.torch_s,
    )
    if config.tier == "full" and capability.tier != "full":
        raise ConfigError(
            f"tier full: not on this machine ({capability.notes[0]}); expected torch and enough memory"
        )
    return replace(capability, notes=[*capability.notes, board.measured])


def as_counted_last(config: DeviceConfig, capability: Capability) -> Capability:
    """Add the last count of the data; the monitor counts them once the agent runs."""
    known = counted(capability, record.read(Path(config.folder)).report)
    return replace(known, notes=[*capability.notes, COUNTING])


class CertificateExpiry:
    """When the current certificate of an identity ends; read again when its file changes."""

    def __init__(self, certificate: Identity | None) -> None:
        self._certificate = certificate
        self._written: tuple[int, int] | None = None
        self._until = 0

    def end(self) -> int:
        """Return the end in seconds since 1970; 0 without a certificate."""
        if self._certificate is None:
            return 0
        stat = (self._certificate.folder / CERT_FILE).stat()
        if (written := (stat.st_ino, stat.st_mtime_ns)) != self._written:
            self._until = int(identity.read(self._certificate.folder).expires.timestamp())
            self._written = written
        return self._until


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
        runtime=Runtime(capability.onnxruntime, capability.max_opset or UNKNOWN_OPSET),
        kind=config.head,
        balanced=config.balanced,
        budget_s=config.head_budget_s,
        calibrate=True,
        cross_validate_below=config.cross_validate_below if config.reads_folder else 0,
        share=config.uploads,
        guard=config.guard,
        root=read_root(Path(config.root)) if config.root else None,
        check=check,
        precision=PrecisionLimits(config.precision, total_memory_mb(), config.latency_ms),
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
    """Prints each new status, shows the progress of downloads, and prints that of a slow reading of the pictures."""

    def __init__(self, agent: Device, progress: Progress, reading: ReadingProgress) -> None:
        self._agent, self._progress, self._reading = agent, progress, reading
        self._line = ""
        self._reading_at_s = -math.inf
        self._fetching: Count | None = None

    def update(self) -> None:
        """Show what has changed."""
        before, self._fetching = self._fetching, self._agent.fetching
        if before and (self._fetching is None or self._fetching.stage != before.stage):
            self._progress(before._replace(done=before.of))
        if self._fetching:
            self._progress(self._fetching)
        if (reading := self._reading.current) and reading.at_s - self._reading_at_s >= READING_S:
            self._reading_at_s = reading.at_s
            self._progress.print(f"{self._agent.name}: {reading}")
        if self._agent.state.published is None:
            return
        status, activity, release, why = self._agent.state.published
        line = f"{self._agent.name}: {status}, {activity}"
        line += (f", release {release}" if release else "") + (f" ({why})" if why else "")
        if line != self._line:
            self._progress.print(line)
            self._line = line
