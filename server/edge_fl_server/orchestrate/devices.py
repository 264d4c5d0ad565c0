"""A run with devices: full devices train, head-only devices receive releases of the extractor; connection, registry entry and hooks.

The first release comes after round 1, so that heads serve early; then every `release.every` rounds, and after the last. Updates are
screened before they count, and the operator is told about devices that get nothing from the run. Simulations do not import this module,
because the broker's client, the registry and ONNX come with it.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path

import msgspec

from edge_fl.console.progress import Progress
from edge_fl.data.class_names import SKIPPED
from edge_fl.errors import DeadlineError, SecureSumError, StatisticsError, StoppedError, shortened
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.screening import with_bounded_weight
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import summarise_reports
from edge_fl.wire.roles import local_person
from edge_fl_server import selectors
from edge_fl_server.mqtt.device_clients import DeviceClients
from edge_fl_server.mqtt.devices.roster import RosterDevice
from edge_fl_server.mqtt.session import Server
from edge_fl_server.orchestrate import class_statistics
from edge_fl_server.orchestrate.class_statistics import StatisticsCollector
from edge_fl_server.orchestrate.execution import RunResult, RunSetup, execute, simulated_clients
from edge_fl_server.orchestrate.releases import MAX_NAMES, RunReleases
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.recipes.recipe import BrokerConfig, Recipe, ValidationConfig
from edge_fl_server.registry import Database, audit, registered_reports, runs
from edge_fl_server.registry.tables import RoundRecord, RunRecord
from edge_fl_server.release import website
from edge_fl_server.release.repository import Repository, require_grown
from edge_fl_server.runs.checkpoint import Checkpoint
from edge_fl_server.runs.recorder import Recorder, RunTotals
from edge_fl_server.runs.results import Results, data_name
from edge_fl_server.training.clients import Clients, HybridClients, NoClients
from edge_fl_server.training.rounds import CombinedHooks, FinalResult, RoundResult, RunHooks

log = logging.getLogger(__name__)
COUNT_S = 2.0  # devices report their pictures soon after their heads


@contextmanager
def registered(db: Database, results: Results) -> Iterator[None]:
    """Enter the run into the registry while it goes on, and its final state afterwards."""
    recipe = results.recipe()
    audit.record(db, recipe.broker.fleet, local_person(), "run", results.id)
    runs.begin(
        db,
        RunRecord(
            run=results.id,
            fleet=recipe.broker.fleet,
            method=recipe.method.name,
            dataset=data_name(recipe),
            source=recipe.source,
            rounds=recipe.rounds,
            folder=str(results.path.absolute()),
        ),
    )
    try:
        yield
    finally:
        state = Results.open(results.path).state()
        if state.state != "running":
            runs.end(db, results.id, state.state, state.reason)


def record_round(db: Database, run: str, result: RoundResult) -> None:
    """Enter a round and the means of its metrics."""
    summaries = summarise_reports(list(result.metrics.values()))
    runs.record_round(
        db,
        RoundRecord(
            run,
            result.round,
            len(result.selected),
            len(result.responded),
            result.seconds,
            {name: None if isnan(summary.mean) else summary.mean for name, summary in summaries.items()},
            {name: summary.clients for name, summary in summaries.items()},
        ),
    )


def require_not_stopped(db: Database, results: Results) -> None:
    """Raise StoppedError if somebody has asked the run to stop."""
    record = runs.get(db, results.id)
    if record and record.desired == "stopped":
        raise StoppedError(
            f"run {results.id} stopped on request; resume it with `edge-fl server run --resume {results.path}`"
        )


class Screening:
    """The screen of a run's updates as `[validation]` says; repeated outliers are quarantined."""

    def __init__(self, method: Method, validation: ValidationConfig, server: Server, run_id: str) -> None:
        self._stated, self._max_weight = method.stated_weight, validation.max_weight
        self._screen = steps.screen(method, validation.max_norm) if validation.max_norm else None
        self._server, self._run_id = server, run_id
        self._rejected: Counter[str] = Counter()

    def round(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        """The updates of a round that count."""
        if self._stated and self._max_weight:
            updates = with_bounded_weight(updates, self._stated, self._max_weight)
        return self._screen.round(updates, shared) if self._screen else updates

    def final(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        """The updates of the final personalisation that count."""
        return self._screen.final(updates, shared) if self._screen else updates

    def rejected(self) -> Mapping[str, int]:
        """Reports and packets that were rejected since the last call, by reason: late, malformed, outlier (dropped update), ..."""
        new = self._server.inbox.counts - self._rejected
        self._rejected.update(new)
        new[Failure.OUTLIER] = len(self._screen.dropped) if self._screen else 0
        return {reason: count for reason, count in sorted(new.items()) if count and reason != "accepted"}

    def record(self, round: int) -> None:
        """Store the outlier scores of devices."""
        if self._screen:
            for id, why in self._screen.dropped.items():
                log.warning(
                    "round %d: the update of %s was not used: %s", round, id, why, extra={"device": id}
                )
            self._store(round, self._screen.scores, self._screen.outliers)

    def record_verdict(self, result: RoundResult) -> None:
        """Count what the round gate decided, and store the outlier scores of the devices named."""
        if result.verdict:
            journal, table = self._server.journal, self._server.roster.table
            named = {id: score for id, score in result.verdict.named.items() if id in table}
            why = f"round {result.round} was worse with its update"
            runs.count_verdict(journal.db, journal.fleet, result.verdict.outcome, len(named))
            self._store(result.round, named, {id: why for id, score in named.items() if score >= 1})

    def _store(self, round: int, scores: Mapping[str, float], outliers: Mapping[str, str]) -> None:
        table = self._server.roster.table
        self._server.journal.record_screening(
            self._run_id,
            round,
            {id: score for id, score in scores.items() if id in table},
            {id: why for id, why in outliers.items() if id in table},
        )


class Advice:
    """Lines about a run's devices; all but the unused pictures are for a run that trains nothing."""

    def __init__(self, recipe: Recipe, server: Server, totals: RunTotals, progress: Progress) -> None:
        self._recipe, self._server, self._totals, self._progress = recipe, server, totals, progress

    def idle_devices(self) -> None:
        """Print the full devices of a run that trains nothing."""
        if self._recipe.source == "none" and (idle := self._server.roster.full_devices()):
            self._progress.print(
                f"full devices are online: {shortened(idle, MAX_NAMES)}; they receive nothing from source 'none'."
                " To fit heads on them, start them with 'edge-fl device run --tier head'"
            )

    def unused_pictures(self) -> None:
        """Print which devices have pictures in folders that are no class, or that cannot be read; their names stay on the device."""
        if self._recipe.source == "none":
            time.sleep(COUNT_S)
        for id, device in sorted(self._server.roster.table.items()):
            notes = device.capability.notes if device.capability else []
            if found := [note for note in notes if SKIPPED in note]:
                self._progress.print(f"{id}: {'; '.join(found)} ('edge-fl device status' on it names them)")

    def accuracies(self) -> None:
        """Print what each device serves and how accurate it is: a run without rounds prints no other accuracy."""
        if self._recipe.source != "none":
            return
        for row in self._totals.rows({})[:MAX_NAMES]:
            if row.fitted or row.after is not None:
                self._progress.print(
                    f"{row.device}: {row.fitted or 'head'} ({row.samples} labelled samples);"
                    f" accuracy: {row.measured.words}"
                )
        given = msgspec.to_builtins(self._recipe.broker).items()
        options = [f" --{name} {value}" for name, value in given if value != getattr(BrokerConfig(), name)]
        self._progress.print(
            f"devices that come later are served while 'edge-fl server up{''.join(options)}' runs"
        )


def rest_heads(server: Server, run_id: str, title: str) -> None:
    """Assign "rest" to head-only devices, also to those that come later: the method `title` shares no extractor."""

    def rest(device: RosterDevice) -> None:
        if device.tier is not Tier.HEAD or not device.ready:
            return
        current = server.assignments.current(device.id)
        if current is None or current.why != Failure.NO_EXTRACTOR:
            text = "%s: head-only, not supported: %s shares no extractor"
            log.warning(text, device.id, title, extra={"device": device.id})
            id, why = f"{run_id}-unsupported", Failure.NO_EXTRACTOR
            server.assignments.assign(device.id, "rest", run_id=run_id, id=id, why=why)

    server.roster.on_change(lambda before, now: rest(now))
    for device in server.roster.table.values():
        rest(device)


class Deployment(RunHooks):
    """What happens to devices in the course of a run. Without `releases` the method shares no extractor."""

    def __init__(
        self,
        setup: RunSetup,
        server: Server,
        results: Results,
        progress: Progress,
        screening: Screening,
        releases: RunReleases | None,
        totals: RunTotals,
        statistics: StatisticsCollector | None,
        advice: Advice,
    ) -> None:
        self._method, self._recipe, self._server = setup.method, setup.recipe, server
        self._results, self._progress, self._screening = results, progress, screening
        self._releases, self._totals, self._statistics, self._advice = releases, totals, statistics, advice
        self._use_head_updates = True
        self._broadcast: Parts = {}  # of the final personalisation
        self._input_shape = setup.spec.input.shape

    def before_round(self, round: int) -> None:
        """Wait for as many full devices as the recipe needs. Raises DeadlineError after `cohort.wait_s`."""
        roster, cohort = self._server.roster, self._recipe.cohort
        needed = 0 if self._recipe.source in ("simulated", "none") else cohort.min_devices
        if (online := len(roster.full_devices())) < needed:
            self._progress.print(f"waiting for {needed} full devices, {online} online")
            roster.wait_for(full=needed, deadline_s=cohort.wait_s)

    def head_updates(self) -> Sequence[Update]:
        return self._releases.rollout.head_updates.take() if self._releases and self._use_head_updates else ()

    def screen(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        return self._screening.round(updates, shared)

    def screen_final(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        return self._screening.final(updates, shared)

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        """Record the round, release if due. Raises StoppedError if the registry asks the run to stop."""
        record_round(self._server.journal.db, self._results.id, result)
        self._screening.record(result.round)
        self._screening.record_verdict(result)
        if self._releases and self._releases.is_due(result.round):
            method = self._method.at(result.round)
            self._releases.release(method, result.shared, result.round, collect=not method.head_tier.final)
        require_not_stopped(self._server.journal.db, self._results)

    def before_final(self, method: Method, shared: Parts, round: int) -> None:
        """Release before the final personalisation if heads contribute to it, and give devices time to return."""
        self._use_head_updates, self._broadcast = method.head_tier.final, shared
        if self._releases and self._use_head_updates:
            self._releases.release(method, shared, round, collect=True)
            self._releases.wait_for_heads()
        try:
            self.before_round(round)
        except DeadlineError as error:
            self._progress.print(f"final personalisation without the missing devices: {error}")

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        """Release the final extractor, wait for heads on it, and release it again with a prior if the recipe asks for one."""
        self._screening.record(result.round)
        if self._releases is None:
            return
        self._releases.release(result.method, result.shared, result.round)
        self._advice.idle_devices()
        self._releases.wait_for_heads()
        if self._statistics and self._collect(self._statistics, self._releases, result):
            self._releases.wait_for_heads()
        self._advice.unused_pictures()
        self._advice.accuracies()

    def _collect(self, statistics: StatisticsCollector, releases: RunReleases, result: FinalResult) -> bool:
        """Release the extractor again with a prior from the devices' class statistics; whether there is one. Prints what was found."""
        try:
            found = statistics.collect(releases.rollout, full=self._trained(result))
        except (SecureSumError, StatisticsError) as error:
            self._progress.print(f"class statistics: none collected: {error}")
            return False
        self._results.write_sum(found)
        self._totals.add_sum(found)
        runs.record_sum(self._server.journal.db, self._results.id, len(found.devices) * found.bytes_each)
        self._progress.print(class_statistics.summary(found, releases.rollout.current))
        return True

    def _trained(self, result: FinalResult) -> str:
        """RUN/ROUND, if the full devices have the extractor that was released; otherwise ""."""
        full = self._server.roster.full_devices()
        same = class_statistics.is_as_broadcast(
            result.method, self._broadcast, result.shared, full, self._input_shape
        )
        return f"{self._results.id}/{result.round}" if full and same else ""


@dataclass(frozen=True)
class Devices:
    """The connected devices of a run, and the fleet's releases."""

    server: Server
    repository: Repository

    def registered(self, results: Results) -> AbstractContextManager[None]:
        """Enter the run into the registry while it goes on, and its final state afterwards."""
        return registered(self.server.journal.db, results)

    def unmeasured(self, results: Results) -> str:
        """Why no device could evaluate or personalise; "" where one could, or none was requested to."""
        return runs.unmeasured(self.server.journal.db, results.id)

    def execute(
        self,
        setup: RunSetup,
        results: Results,
        totals: RunTotals,
        progress: Progress,
        saved: Checkpoint | None,
        hooks: RunHooks,
    ) -> RunResult:
        """Run all rounds and releases. Raises as `execute`, and DeadlineError when too few devices connect."""
        server, recipe = self.server, setup.recipe
        db, fleet, where = server.journal.db, server.journal.fleet, recipe.cohort.where
        for record in registered_reports.of_run(db, results.id):  # from before an interruption
            totals.note(record.device, registered_reports.report_of(record))
        selectors.require(db, fleet, where, recipe.release.rollout.where)
        server.roster.train_only(selectors.Selection(db, fleet, where))
        config = class_statistics.settings_of(recipe, setup.method)
        sums = config.sums != "none"
        releases = self._releases(setup, results, totals, progress, sums)
        full = DeviceClients(
            server, results.id, setup.spec, recipe, on_report=totals.note, torch_device=setup.device
        )
        screening = Screening(setup.method, recipe.validation, server, results.id)
        identity = Path(recipe.broker.identity) if recipe.broker.identity else None
        deployment = Deployment(
            setup,
            server,
            results,
            progress,
            screening,
            releases,
            totals,
            StatisticsCollector(config, server, identity) if sums else None,
            Advice(recipe, server, totals, progress),
        )
        recorder = Recorder(results, setup.plan, totals, screening.rejected)
        try:
            clients = _clients(setup, full)
            outcome = execute(setup, clients, CombinedHooks(recorder, hooks, deployment), progress, saved)
            return replace(outcome, stopped=releases.stopped if releases else None)
        finally:
            full.close()
            if releases:
                releases.rollout.close()
            recorder.conclude(server.roster.table)

    def _releases(
        self, setup: RunSetup, results: Results, totals: RunTotals, progress: Progress, statistics: bool
    ) -> RunReleases | None:
        """None for a method without an extractor to release: head-only devices rest then."""
        if setup.method.exports:
            if setup.recipe.release.website:
                website.keep(self.repository, Path(setup.recipe.release.website))
            server, repository = self.server, self.repository
            return RunReleases(setup, server, repository, results, totals, progress, statistics=statistics)
        title = setup.method.title
        progress.print(f"{title} shares no extractor: head-only devices receive nothing from this run")
        rest_heads(self.server, results.id, title)
        return None


@contextmanager
def connected(access: FleetAccess, setup: RunSetup, *, takeover: bool) -> Iterator[Devices]:
    """Open the registry and connect to the broker for the block. Raises InputError and ConnectError."""
    recipe = setup.recipe
    if recipe.source == "none" and (access.home / access.fleet / "metadata").is_dir():
        require_grown(
            setup.spec.classes, access.repository().releases()
        )  # devices have heads for these classes
    with closing(Database.open(access.registry)) as db:
        after = recipe.validation.quarantine_after
        with access.online(db, takeover=takeover, quarantine_after=after) as server:
            yield Devices(server, access.repository())


def _clients(setup: RunSetup, full: DeviceClients) -> Clients:
    """The clients that train, by the recipe's source."""
    if setup.recipe.source == "none":
        return NoClients()
    if setup.recipe.source == "fleet":
        return full
    simulated = simulated_clients(setup)
    return simulated if setup.recipe.source == "simulated" else HybridClients(full, simulated)
