"""Assemble and run one real device in its own process: data, board, worker, agent and monitor."""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from edge_fl import threads
from edge_fl.console.progress import Progress
from edge_fl.errors import ArtefactError, ConnectError
from edge_fl.files import disk
from edge_fl.memory import total_memory_mb
from edge_fl.wire import identity
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connect
from edge_fl_devices.agent.events import DataChanged, Event
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.child import Children
from edge_fl_devices.config import read_root, remember
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.features.child_loader import ChildFeatureLoader
from edge_fl_devices.install import canary
from edge_fl_devices.install.mirror import Mirror
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.remote.answering import Responder
from edge_fl_devices.remote.log_file import LogFile, private_paths, recording
from edge_fl_devices.remote.settings import RemoteSettings
from edge_fl_devices.runtime import device
from edge_fl_devices.runtime.certificates import CertificateExpiry
from edge_fl_devices.runtime.device import Device, Services
from edge_fl_devices.runtime.inspector import Board, Inspector, as_counted_last, inspect_board
from edge_fl_devices.runtime.maintenance import Maintenance, StatusDisplay, report_waiting
from edge_fl_devices.runtime.monitor import COUNTING, DeviceMonitor, counted
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.runtime.updating import Updating
from edge_fl_devices.storage.slots import InstalledRelease
from edge_fl_devices.storage.store import Answers, Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import head_worker
from edge_fl_devices.workers.head_fitting import ChildFitter
from edge_fl_devices.workers.releases import PrecisionLimits
from edge_fl_devices.workers.worker import MakeWorker, Trainer

log = logging.getLogger(__name__)

ROOM_S = 10.0  # between looks at a full disk
START_BYTES = 64 * 1024  # memory, settings and state, and some room


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

    def watch() -> None:
        """Count the data and watch them: what takes longer with every picture must not delay that the agent is ready."""
        runner.ready.wait()
        monitor.run(stopped)

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
        current = CurrentData(config, take_count)
        loader = ChildFeatureLoader(config, children, current)
        found, problem = inspect_board(config, loader)
        trainer = Trainer(
            lambda: full_worker()(config.id, store, current, threads=config.threads, epsilon=config.epsilon)
        )
        board = Board(config, found, trainer.use_tier)
        trust = Trust(
            store.folder / "tuf",
            read_root(Path(config.root)) if config.root else None,
            trust_on_first_use=not config.root,
        )
        worker = head_worker(
            config.id,
            store,
            FitSettings(
                config.head,
                balanced=config.balanced,
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
        updating = Updating(
            config,
            trust,
            lambda: agent.state,
            lambda requested: agent.connection.carry_out(requested),
            deliver,
            runner.stop,
        )
        capability = replace(
            as_counted_last(config, board.capability),
            certificate_until=expiry.end(),
            settings=settings.status,
            update=updating.status,
        )
        agent = device.start(
            config.id,
            Topics(config.broker.fleet),
            capability,
            worker,
            data_problem=problem,
            identity=folder,
            services=Services(Responder(config, file, folder).receive, settings.receive, updating.desire),
            sum_floors=config.sums,
        )
        log.info("%s: agent %s started", config.id, capability.agent)
        stack.enter_context(updating.running())
        progress.print(f"{config.id}: {capability.notes[0]}; {COUNTING}; broker {config.broker.endpoint}")
        runner.add(agent, updating.through(connect))
        threads.once(partial(report_waiting, agent, progress.print), "edge-fl-connecting").start()
        stopped = threading.Event()
        monitor = DeviceMonitor(
            config,
            agent,
            deliver,
            Meter(store.folder, lambda: agent.connection.wire_bytes, watts=config.budget.watts),
            Inspector(config, agent, loader, board.measure_again, progress.print),
            current,
        )
        threads.lasting(watch, "edge-fl-monitor", stopped=stopped).start()
        display = StatusDisplay(agent, progress, loader.progress)
        try:
            runner.run(done=Maintenance(agent, runner, settings, expiry, renew, display))
        finally:
            stopped.set()
    if agent.denied and not runner.continues:
        raise ConnectError(
            f"{config.id}: broker {config.broker.endpoint} denies access to this device ({agent.denied})",
            consequence="stopped",
        )
    return updating.exit_code


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
