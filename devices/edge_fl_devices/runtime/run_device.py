"""Assemble and run one real device in its own process: data, board, worker, agent, monitor, and what it shows on its terminal."""

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
from edge_fl.errors import ArtefactError, ConnectError
from edge_fl.files import disk
from edge_fl.process_limits import total_memory_mb
from edge_fl.wire import identity
from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connect
from edge_fl_devices.agent.events import DataChanged, Event
from edge_fl_devices.agent.state import Phase
from edge_fl_devices.agent_update.state import Updates
from edge_fl_devices.agent_update.updater import AgentUpdater
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.child import Children
from edge_fl_devices.config import read_root, remember
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.location import Snapshot
from edge_fl_devices.data.record import DataReport
from edge_fl_devices.features.child_loader import ChildFeatureLoader, ReadingProgress
from edge_fl_devices.install import canary
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.remote.answering import Responder
from edge_fl_devices.remote.applied_settings import RemoteSettings
from edge_fl_devices.remote.log_file import LogFile, private_paths, recording
from edge_fl_devices.runtime.certificates import CertificateExpiry
from edge_fl_devices.runtime.device import SIMULATED, Device, Services
from edge_fl_devices.runtime.monitor import (
    COUNTING,
    Board,
    DeviceMonitor,
    as_counted_last,
    counted,
    inspect_board,
)
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.slots import InstalledRelease
from edge_fl_devices.storage.store import Answers, Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import ChildFitter
from edge_fl_devices.workers.releases import Mirror, PrecisionLimits
from edge_fl_devices.workers.worker import MakeWorker, Trainer

log = logging.getLogger(__name__)

CONNECT_S, MAX_CONNECT_S = 15.0, 900.0
READING_S = 60.0  # between lines about a slow reading of the data
ROOM_S = 10.0  # between looks at a full disk
START_BYTES = 64 * 1024  # memory, settings and state, and some room


def report_waiting(agent: Device, show: Callable[[str], None]) -> None:
    """Report with growing pauses that the broker cannot be reached, until it is."""
    pause_s = CONNECT_S
    while True:
        try:
            agent.connection.wait(pause_s)
        except ConnectError as error:
            if agent.denied or agent.state.status == "disconnected":
                return
            learns = "; new labels are learned without it" if agent.state.refit_on else ""
            show(f"{error}; trying again{learns}")
            pause_s = min(2 * pause_s, MAX_CONNECT_S)
        else:
            return


class StatusDisplay:
    """Prints each new status, shows the progress of downloads, and prints that of a slow reading of the data."""

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
        state = self._agent.state
        if state.phase is Phase.OFFLINE and state.work:  # otherwise the connection says what is the matter
            status, activity, release, why = "no broker", state.activity, state.release, state.reason
        elif state.published is None:
            return
        else:
            status, activity, release, why = state.published
        line = f"{self._agent.name}: {status}, {activity}"
        line += (f", release {release}" if release else "") + (f" ({why})" if why else "")
        if line != self._line:
            self._progress.print(line)
            self._line = line


def run_device(
    settings: RemoteSettings,
    connect: Connect,
    runner: Runner,
    children: Children,
    full_worker: Callable[[], MakeWorker],
    progress: Progress,
    renew: Callable[[], None] = lambda: None,
) -> int:
    """Run the device until `runner` is stopped or continues with other settings -> the exit code: RESTART if another version of the
    agent should start.

    children: a pool that computes features. full_worker: called only for the full tier, because it imports torch. progress: shows
    status lines and downloads. renew: called periodically, for the certificate.
    Raises InputError for unusable settings, data or folder, ConnectError if the broker denies access.
    """
    config = settings.config
    store = Store(Path(config.folder))
    agent: Device  # made below; until it runs none of these functions is called

    def deliver(event: Event) -> None:
        runner.deliver(agent, event)

    def take_count(report: DataReport) -> None:
        """Announce the count of what a round trains on before its update: the server rejects one on more samples."""
        found = counted(agent.state.capability, report)
        if found != agent.state.capability:
            deliver(DataChanged(found, refit=False))

    def check(installed: InstalledRelease) -> None:
        """Run the canary, while a child for the features starts in parallel."""
        children.start()
        canary.require(installed)

    def inspect(snapshot: Snapshot) -> Capability:
        """See `edge_fl_devices.runtime.monitor.Inspect`."""
        return board.inspect(agent.state.capability, snapshot)

    def watch() -> None:
        """Count the data and watch them: what takes longer with every sample must not delay that the agent is ready."""
        runner.ready.wait()
        monitor.run(stopped)

    def must_end() -> bool:
        """Renew the certificate, show the status, and tell whether the broker denies access or the agent starts with other settings."""
        state = agent.state
        renew()
        display.update()
        if (until := expiry.end()) != state.capability.certificate_until:  # renewed
            changed = replace(state.capability, certificate_until=until)
            deliver(DataChanged(changed, state.data_problem, refit=False))
        denied = bool(agent.denied)
        settings.observe(state.connected, denied, time.monotonic())
        if settings.restart_due and (denied or state.work is None):
            runner.hand_over()
        return runner.continues or denied

    with ExitStack() as stack:
        stack.enter_context(store.owned())
        file = LogFile(store.folder, config.id, private_paths(config))
        stack.enter_context(recording(file))
        if not _has_room(store, runner, lambda line: progress.print(f"{config.id}: {line}")):
            return 0
        if (answers := Answers(config.promise, config.false_alarm)) != store.answers():
            store.keep_answers(answers)
        with suppress(OSError):  # only `device serve` misses them
            remember(config)
        current = CurrentData(config, take_count)
        loader = ChildFeatureLoader(config, children, current)
        found, problem = inspect_board(config, loader)
        trainer = Trainer(
            lambda: full_worker()(
                config.id,
                store,
                current,
                threads=config.threads,
                epsilon=config.epsilon,
                share=config.uploads,
                data_stamp=current.stamp,
            )
        )
        board = Board(config, found, loader, trainer.use_tier, progress.print)
        trust = Trust(
            store.folder / "tuf",
            read_root(Path(config.root)) if config.root else None,
            trust_on_first_use=not config.root,
        )
        worker = HeadWorker(
            config.id,
            store,
            FitSettings(
                config.head,
                balanced=config.balanced,
                closed=bool(config.classes),
                budget_s=config.head_budget_s,
                calibrate=True,
                cross_validate_below=config.cross_validate_below if config.reads_folder else 0,
            ),
            loader=loader,
            fitter=ChildFitter(),
            runtime=board.runtime,
            trust=trust,
            check=check,
            precision=PrecisionLimits(config.precision, total_memory_mb(), config.latency_ms),
            mirror=Mirror(config.mirror) if config.mirror else None,
            train=trainer.perform,
            data_stamp=current.stamp,
            share=config.uploads,
            guard=config.guard,
        )
        certificate = identity.certificate_in(config.broker.identity)
        expiry, folder = CertificateExpiry(certificate), certificate.folder if certificate else None
        updater: AgentUpdater | None = None
        if updates := Updates.of_environment():
            updater = AgentUpdater(
                updates,
                config,
                trust,
                lambda: agent.state,
                lambda requested: agent.connection.carry_out(requested),
                deliver,
                runner.stop,
            )
            connect = updater.through(connect)
        desire = updater.desire if updater else SIMULATED.desire_update
        capability = replace(
            as_counted_last(config, board.capability),
            certificate_until=expiry.end(),
            settings=settings.status,
            update=updater.status if updater else None,
        )
        agent = Device(
            config.id,
            Topics(config.broker.fleet),
            capability,
            worker,
            data_problem=problem,
            identity=folder,
            services=Services(Responder(config, file, folder).receive, settings.receive, desire),
            sum_floors=config.sums,
        )
        log.info("%s: agent %s started", config.id, capability.agent)
        if updater:
            stack.enter_context(updater.running())
        progress.print(f"{config.id}: {capability.notes[0]}; {COUNTING}; broker {config.broker.endpoint}")
        runner.add(agent, connect)
        threads.once(partial(report_waiting, agent, progress.print), "edge-fl-connecting").start()
        stopped = threading.Event()
        meter = Meter(store.folder, lambda: agent.connection.wire_bytes, watts=config.budget.watts)
        monitor = DeviceMonitor(
            config,
            agent,
            deliver,
            meter,
            inspect,
            current,
        )
        threads.lasting(watch, "edge-fl-monitor", stopped=stopped).start()
        display = StatusDisplay(agent, progress, loader.progress)
        try:
            runner.run(done=must_end)
        finally:
            stopped.set()
            meter.update(last=True)
    if agent.denied and not runner.continues:
        raise ConnectError(
            f"{config.id}: broker {config.broker.endpoint} denies access to this device ({agent.denied})",
            consequence="stopped",
        )
    return updater.exit_code if updater else 0


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
