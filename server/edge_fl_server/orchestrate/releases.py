"""The releases of a run: export, sign and roll out the extractor, and wait until heads on it have reported."""

from collections.abc import Sequence

import msgspec

from edge_fl.console import units
from edge_fl.console.progress import Progress
from edge_fl.console.units import counted
from edge_fl.errors import GateError, shortened
from edge_fl.files import atomic
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import tiers
from edge_fl.methods.contract.method import Method
from edge_fl.wire.egress import STATISTICS
from edge_fl_server.mqtt.session import Server
from edge_fl_server.orchestrate.class_statistics import INHERITED
from edge_fl_server.orchestrate.execution import RunSetup
from edge_fl_server.registry import rollouts
from edge_fl_server.release import fleet_head, quantise
from edge_fl_server.release.export import Quantiser
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.commands import failure
from edge_fl_server.release.rollout.coordinator import CoordinatorOptions, RolloutCoordinator
from edge_fl_server.release.rollout.stages import cause
from edge_fl_server.runs.recorder import RunTotals
from edge_fl_server.runs.results import Results
from edge_fl_server.training import studies

MAX_NAMES = 8  # devices named in one message


class RunReleases:
    """Releases of the run's extractor to the fleet; their reports are added to `totals`.

    statistics: whether the run collects class statistics. `stopped` is set if a gate stopped the roll-out of the last release.
    """

    def __init__(
        self,
        setup: RunSetup,
        server: Server,
        repository: Repository,
        results: Results,
        totals: RunTotals,
        progress: Progress,
        *,
        statistics: bool,
    ) -> None:
        self._setup, self._server, self._results, self._progress = setup, server, results, progress
        self._trained = 0  # the last release, without those that only add a prior
        self.stopped: GateError | None = None
        options = CoordinatorOptions(
            setup.recipe.release.rollout,
            run_id=results.id,
            quantiser=_quantiser(setup, progress),
            watch=progress,
            inherited=INHERITED if statistics else {},
            sums=[STATISTICS] if statistics else [],
            serves=setup.recipe.release.serves,
        )
        self.rollout = RolloutCoordinator(
            server, repository, options, on_report=totals.note, torch_device=setup.device
        )

    def is_due(self, round: int) -> bool:
        """Whether a release follows this round; the one after the last round is separate."""
        recipe = self._setup.recipe
        return round < recipe.rounds and is_due(round, recipe.release.every)

    def release(self, method: Method, shared: Parts, round: int, *, collect: bool = False) -> None:
        """Export, sign and roll out the extractor. With `collect` devices send head updates on it."""
        self._name(self._missing())
        setup, run_id, journal = self._setup, self._results.id, self._server.journal
        fleet = None
        if setup.study and tiers.fleets_head(method.head_tier) != PRIOR:
            clients = setup.study.data().values()
            fleet = fleet_head.compute(method, shared, clients, len(setup.spec.classes), setup.device)
        manifest = self.rollout.release(
            method, shared, setup.spec, run_id=run_id, round=round, collect=collect, fleet=fleet
        )
        self._trained = manifest.release
        method.net.to(setup.device)  # the export moved it to the CPU
        atomic.write(
            self._results.artefacts / f"release-{manifest.release}.json",
            msgspec.json.format(msgspec.json.encode(manifest)),
        )
        rollouts.record_release(journal.db, rollouts.published(journal.fleet, manifest))
        heads = len(self._server.roster.head_devices())
        after = f" after round {round}" * (round > 0)
        self._progress.print(
            f"release {manifest.release}{after}: {units.size(manifest.bytes)} for {heads} head-only devices"
        )

    def wait_for_heads(self) -> None:
        """Wait until a roll-out in stages has ended or paused, and heads on the current release have reported, within the limits."""
        rollout = self.rollout
        if rollout.current is None:
            return
        if rollout.missing():
            self._progress.print(f"waiting for heads on release {rollout.current.release}")
        stages = rollout.stages
        if stages and stages.gated:
            rollout.rest(len(stages.shares) * stages.plan.stage_wait_s)
        missing = self._missing()
        stages = rollout.stages
        if stages and stages.state != "completed" and (stages.gated or stages.state != "running"):
            where = f"{stages.state} in stage {stages.stage + 1} of {len(stages.shares)}"
            why = cause(stages.reason, stages.stage)
            self._progress.print(f"release {stages.release}: {where} ({why}); see 'edge-fl release list'")
        newest = next(iter(rollouts.listed(self._server.journal.db, self._server.journal.fleet)), None)
        if newest and newest.release == self._trained:
            error = failure(newest)
            self.stopped = error if isinstance(error, GateError) else None
        self._name(missing)

    def _missing(self) -> Sequence[str]:
        """Wait for the heads that the recipe asks for -> the devices that did not report in time."""
        limits = self._setup.recipe.release
        return self.rollout.wait(limits.heads, limits.wait_s) if self.rollout.current else ()

    def _name(self, missing: Sequence[str]) -> None:
        if missing and self.rollout.current:
            wait_s = self._setup.recipe.release.wait_s
            self._progress.print(
                f"release {self.rollout.current.release}: {counted(len(missing), 'device')} did not report within {wait_s:g} s:"
                f" {shortened(missing, MAX_NAMES)}"
            )


def is_due(round: int, every: int) -> bool:
    """Whether a release follows this round: 1, 1 + every, 1 + 2 * every, ..."""
    return every > 0 and (round - 1) % every == 0


def _quantiser(setup: RunSetup, progress: Progress) -> Quantiser | None:
    """What makes int8 variants, calibrated on the simulated clients' data, the server's copy of the dataset, or synthetic images."""
    gate, spec = setup.recipe.release.quantise, setup.spec
    if not gate.int8:
        return None
    if not setup.recipe.data.dataset:
        return quantise.quantiser_without_data(spec.input, gate, spec.seed, progress.print)
    study = setup.study or studies.prepare(setup.recipe)
    return quantise.quantiser(list(study.data().values()), gate, spec.seed, progress.print)
