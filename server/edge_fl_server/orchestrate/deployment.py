"""A run's deployment to devices: wait for devices, release the extractor, wait for heads on it, record rounds in the registry.

The first release comes after round 1, so that heads serve early; then every `release.every` rounds, and after the last.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from pathlib import Path

import msgspec

from edge_fl.console import units
from edge_fl.console.progress import Progress
from edge_fl.console.units import counted
from edge_fl.data.class_names import OUTSIDE
from edge_fl.errors import DeadlineError, SecureSumError, StatisticsError, StoppedError
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.files import atomic
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.screening import with_bounded_weight
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import summarise_reports
from edge_fl.wire.egress import STATISTICS
from edge_fl.wire.roles import local_person
from edge_fl_server.mqtt.device_clients import DeviceClients, DeviceLimits
from edge_fl_server.mqtt.devices.roster import Device
from edge_fl_server.mqtt.session import Server
from edge_fl_server.orchestrate.setup import RunSetup
from edge_fl_server.orchestrate.statistics import INHERITED, StatisticsCollector
from edge_fl_server.recipes.recipe import BrokerConfig
from edge_fl_server.registry import Database, audit, releases, runs
from edge_fl_server.registry.records import RoundRecord, RunRecord
from edge_fl_server.release import quantise, website
from edge_fl_server.release.export import Quantiser
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.coordinator import RolloutCoordinator, RolloutOptions
from edge_fl_server.release.rollout.stages import cause
from edge_fl_server.runs.results import Results, data_name
from edge_fl_server.runs.totals import RunTotals
from edge_fl_server.selectors import fleet as selectors
from edge_fl_server.training import study as studies
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, RoundResult, RunHooks

log = logging.getLogger(__name__)

COUNT_S = 2.0
MAX_NAMES = 8  # devices named in one message


class Deployment(RunHooks):
    """The devices' side of a run: full devices train (`devices`), head-only devices receive releases."""

    def __init__(
        self,
        setup: RunSetup,
        server: Server,
        results: Results,
        totals: RunTotals,
        progress: Progress,
        home: Path,
    ) -> None:
        self._setup, self._server, self._results = setup, server, results
        self._totals, self._progress = totals, progress
        self._rejected: Counter[str] = Counter()
        self._use_head_updates = True
        db, broker, cohort = server.journal.db, setup.recipe.broker, setup.recipe.cohort
        selectors.require(db, broker.fleet, cohort.where, setup.recipe.release.rollout.where)
        server.roster.train_only(selectors.Selection(db, broker.fleet, cohort.where))
        max_norm = setup.recipe.validation.max_norm
        self._screen = steps.screen(setup.method, max_norm) if max_norm else None
        self._rollout = self._make_rollout(home)
        wanted = setup.recipe.statistics.sums != "none"
        self._statistics = StatisticsCollector(setup.recipe, server) if wanted else None
        self.devices = self._make_devices()

    def close(self) -> None:
        """Withdraw assignments and stop publishing."""
        self.devices.close()
        if self._rollout:
            self._rollout.close()

    def rejected(self) -> Mapping[str, int]:
        """Reports and packets that were rejected since the last call, by reason: late, malformed, outlier (dropped update), ..."""
        new = self._server.inbox.counts - self._rejected
        self._rejected.update(new)
        new[Failure.OUTLIER] = len(self._screen.dropped) if self._screen else 0
        return {reason: count for reason, count in sorted(new.items()) if count and reason != "accepted"}

    def before_round(self, round: int) -> None:
        self._wait_for_devices()

    def head_updates(self) -> Sequence[Update]:
        return self._rollout.head_updates.take() if self._rollout and self._use_head_updates else ()

    def screen(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        place, most = self._setup.method.stated_weight, self._setup.recipe.validation.max_weight
        if place and most:
            updates = with_bounded_weight(updates, place, most)
        return self._screen.round(updates, shared) if self._screen else updates

    def screen_final(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        return self._screen.final(updates, shared) if self._screen else updates

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        """Note the round in the registry, release if due. Raises StoppedError if the registry asks the run to stop."""
        recipe, method = self._setup.recipe, self._setup.method.at(result.round)
        runs.record_round(self._server.journal.db, _registry_record(self._results.id, result))
        self._record_screening(result.round)
        self._record_verdict(result)
        if result.round < recipe.rounds and is_due(result.round, recipe.release.every):
            self._release(method, result.shared, result.round, collect=not method.head_tier.final)
        record = runs.get(self._server.journal.db, self._results.id)
        if record and record.desired == "stopped":
            raise StoppedError(
                f"run {self._results.id} stopped on request; resume it with `edge-fl server run --resume {self._results.path}`"
            )

    def _record_screening(self, round: int) -> None:
        """Store the outlier scores of devices; repeated outliers are quarantined."""
        if self._screen:
            for id, why in self._screen.dropped.items():
                log.warning(
                    "round %d: the update of %s was not used: %s", round, id, why, extra={"device": id}
                )
            table = self._server.roster.table
            scores = {id: score for id, score in self._screen.scores.items() if id in table}
            outliers = {id: why for id, why in self._screen.outliers.items() if id in table}
            self._server.journal.record_screening(self._results.id, round, scores, outliers)

    def _record_verdict(self, result: RoundResult) -> None:
        """Count what the round gate decided, and store the outlier scores of the devices named; repeated outliers are quarantined."""
        if result.verdict:
            table, journal = self._server.roster.table, self._server.journal
            scores = {id: score for id, score in result.verdict.named.items() if id in table}
            why = f"round {result.round} was worse with its update"
            outliers = {id: why for id, score in scores.items() if score >= 1}
            runs.count_verdict(journal.db, journal.fleet, result.verdict.outcome, len(scores))
            journal.record_screening(self._results.id, result.round, scores, outliers)

    def before_final(self, method: Method, shared: Parts, round: int) -> None:
        """Release before the final personalisation if heads contribute to it, and give devices time to return."""
        self._use_head_updates = method.head_tier.final
        if self._use_head_updates and self._rollout:
            self._release(method, shared, round, collect=True)
            self._wait_for_heads(announce=True)
        try:
            self._wait_for_devices()
        except DeadlineError as error:
            self._progress.print(f"final personalisation without the missing devices: {error}")

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        """Release the final extractor and wait for heads on it."""
        self._record_screening(result.round)
        if self._rollout:
            self._release(result.method, result.shared, result.round)
            self._name_idle_devices()
            self._wait_for_heads(announce=True)
            self._collect_statistics()
            self._print_pictures_outside()
            if self._setup.recipe.source == "none":
                self._print_accuracies()

    def _collect_statistics(self) -> None:
        """Release the extractor again with a prior from the devices' class statistics, if the recipe requests their sum."""
        if self._statistics is None or self._rollout is None:
            return
        try:
            found = self._statistics.release(self._rollout)
        except (SecureSumError, StatisticsError) as error:
            self._progress.print(f"class statistics: {error}")
        else:
            self._results.write_sum(found)
            self._totals.add_sum(found)
            current = self._rollout.current
            self._progress.print(
                f"class statistics: {found.pictures} pictures of {len(found.devices)} devices"
                + (f", epsilon {found.epsilon:.3g}" if found.epsilon else "")
                + (f"; release {current.release} has their prior" if current else "")
            )
        self._wait_for_heads(announce=True)

    def _name_idle_devices(self) -> None:
        """Print the full devices of a run that trains nothing."""
        if self._setup.recipe.source == "none" and (idle := self._server.roster.full_devices()):
            self._progress.print(
                f"full devices are online: {_names(idle)}; they receive nothing from source 'none'. To fit heads on them, start them"
                " with 'edge-fl device run --tier head'"
            )

    def _print_accuracies(self) -> None:
        """Print what each device measured with its head: a run without rounds prints no other accuracy."""
        for row in self._totals.rows({})[:MAX_NAMES]:
            if row.after is not None:
                self._progress.print(
                    f"{row.device}: accuracy {row.after:.3f} ({row.samples} labelled images)"
                )
        given = msgspec.to_builtins(self._setup.recipe.broker).items()
        options = [f" --{name} {value}" for name, value in given if value != getattr(BrokerConfig(), name)]
        self._progress.print(
            f"devices that come later are served while 'edge-fl server up{''.join(options)}' runs"
        )

    def _print_pictures_outside(self) -> None:
        """Print which devices have pictures in folders that are no class, as they report it soon after their heads."""
        if self._setup.recipe.source == "none":
            time.sleep(COUNT_S)
        for id, device in sorted(self._server.roster.table.items()):
            notes = device.capability.notes if device.capability else []
            if found := [note for note in notes if OUTSIDE in note]:
                self._progress.print(f"{id}: {'; '.join(found)}; its own log names the folder")

    def _wait_for_devices(self) -> None:
        recipe, roster = self._setup.recipe, self._server.roster
        needed = 0 if recipe.source in ("simulated", "none") else recipe.cohort.min_devices
        if (online := len(roster.full_devices())) < needed:
            self._progress.print(f"waiting for {needed} full devices, {online} online")
            roster.wait_for(full=needed, deadline_s=recipe.cohort.wait_s)

    def _release(self, method: Method, shared: Parts, round: int, *, collect: bool = False) -> None:
        """Export, sign and roll out the extractor. With `collect` devices send head updates on it."""
        if self._rollout is None:
            return
        self._wait_for_heads(announce=False)
        setup, run_id = self._setup, self._results.id
        manifest = self._rollout.release(
            method, shared, setup.spec, run_id=run_id, round=round, collect=collect
        )
        method.net.to(setup.device)  # the export moved it to the CPU
        atomic.write(
            self._results.artefacts / f"release-{manifest.release}.json",
            msgspec.json.format(msgspec.json.encode(manifest)),
        )
        journal = self._server.journal
        releases.record(journal.db, releases.published(journal.fleet, manifest))
        heads = len(self._server.roster.head_devices())
        after = f" after round {round}" * (round > 0)
        self._progress.print(
            f"release {manifest.release}{after}: {units.size(manifest.extractor.bytes)} for {heads} head-only devices"
        )

    def _wait_for_heads(self, *, announce: bool) -> None:
        """Wait until heads on the current release have reported, within the limits; devices without a report are named."""
        rollout, limits = self._rollout, self._setup.recipe.release
        if rollout is None or rollout.current is None:
            return
        if announce:
            if rollout.missing():
                self._progress.print(f"waiting for heads on release {rollout.current.release}")
            self._finish_rollout(rollout)
        missing = rollout.wait(limits.heads, limits.wait_s)
        if announce:
            self._print_rollout(rollout)
        if missing:
            self._progress.print(
                f"release {rollout.current.release}: {counted(len(missing), 'device')} did not report within {limits.wait_s:g} s:"
                f" {_names(missing)}"
            )

    def _finish_rollout(self, rollout: RolloutCoordinator) -> None:
        """Wait until a roll-out in stages has ended or paused."""
        if (stages := rollout.stages) and stages.gated:
            rollout.rest(len(stages.shares) * stages.plan.stage_wait_s)

    def _print_rollout(self, rollout: RolloutCoordinator) -> None:
        """Print where and why a roll-out has paused or ended early."""
        stages = rollout.stages
        if stages and stages.state != "completed" and (stages.gated or stages.state != "running"):
            where = f"{stages.state} in stage {stages.stage + 1} of {len(stages.shares)}"
            why = cause(stages.reason, stages.stage)
            self._progress.print(f"release {stages.release}: {where} ({why}); see 'edge-fl release list'")

    def _make_rollout(self, home: Path) -> RolloutCoordinator | None:
        """None for a method without an extractor to release: head-only devices rest then."""
        recipe, server, method = self._setup.recipe, self._server, self._setup.method
        if not method.exports:
            self._progress.print(
                f"{method.title} shares no extractor: head-only devices receive nothing from this run"
            )
            server.roster.on_change(lambda before, now: self._rest(now))
            for device in server.roster.table.values():
                self._rest(device)
            return None
        repository = Repository(home / recipe.broker.fleet)
        if recipe.release.website:
            website.keep(repository, Path(recipe.release.website))
        options = RolloutOptions(
            recipe.release.rollout,
            run_id=self._results.id,
            quantiser=self._quantiser(),
            watch=self._progress,
            inherited=INHERITED if recipe.statistics.sums != "none" else {},
            sums=[STATISTICS] if recipe.statistics.sums != "none" else [],
        )
        return RolloutCoordinator(
            server, repository, options, on_report=self._totals.note, torch_device=self._setup.device
        )

    def _rest(self, device: Device) -> None:
        """Assign "rest" to a head-only device that is ready; its state repeats the reason."""
        if device.tier is not Tier.HEAD or not device.ready:
            return
        assignments, run_id = self._server.assignments, self._results.id
        current = assignments.current(device.id)
        if current is None or current.why != Failure.NO_EXTRACTOR:
            title = self._setup.method.title
            text = "%s: head-only, not supported: %s shares no extractor"
            log.warning(text, device.id, title, extra={"device": device.id})
            rest_id = f"{run_id}-unsupported"
            assignments.assign(device.id, "rest", run_id=run_id, id=rest_id, why=Failure.NO_EXTRACTOR)

    def _make_devices(self) -> DeviceClients:
        cohort, validation = self._setup.recipe.cohort, self._setup.recipe.validation
        staleness = cohort.max_staleness if cohort.buffer_size else None
        limits = DeviceLimits(
            cohort.deadline_s,
            max_growth=validation.max_growth,
            max_weight=validation.max_weight,
            max_staleness=staleness,
        )
        return DeviceClients(
            self._server,
            self._results.id,
            self._setup.spec,
            limits,
            on_report=self._totals.note,
            torch_device=self._setup.device,
        )

    def _quantiser(self) -> Quantiser | None:
        """What makes int8 variants, calibrated on the simulated clients' data, the server's copy of the dataset, or synthetic images."""
        gate, spec = self._setup.recipe.release.quantise, self._setup.spec
        if not gate.int8:
            return None
        if not self._setup.recipe.data.dataset:
            return quantise.quantiser_without_pictures(spec.input, gate, spec.seed, self._progress.print)
        study = self._setup.study or studies.prepare(self._setup.recipe)
        data = list(study.data().values())
        return quantise.quantiser(data, gate, spec.seed, self._progress.print)


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


def is_due(round: int, every: int) -> bool:
    """Whether a release follows this round: 1, 1 + every, 1 + 2 * every, ... The release after the last round is separate."""
    return every > 0 and (round - 1) % every == 0


def _names(devices: Sequence[str]) -> str:
    return ", ".join(devices[:MAX_NAMES]) + (", ..." if len(devices) > MAX_NAMES else "")


def _registry_record(run: str, result: RoundResult) -> RoundRecord:
    summaries = summarise_reports(list(result.metrics.values()))
    return RoundRecord(
        run,
        result.round,
        len(result.selected),
        len(result.responded),
        result.seconds,
        result.bytes_down,
        result.bytes_up,
        {name: None if isnan(summary.mean) else summary.mean for name, summary in summaries.items()},
        {name: summary.clients for name, summary in summaries.items()},
    )
