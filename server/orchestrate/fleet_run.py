"""One run against a fleet, from a recipe to its results: train, release, let heads fit, measure, and end in one named state.

    recipe -> dataset, spec, method -> fleet -> rounds.run -> (release every so often) -> rounds.close -> last release -> results

The source says whose data the extractor is trained on: `fleet` (on the devices; of the dataset only the shape, mean, std and class names
are used here), `simulated` (clients in this process) or `hybrid` (both in one cohort). Releases go to head-only devices in all three.
The first release comes after round 1, so that heads serve something early, then every `release.every` rounds and after the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import msgspec

from edge_fl import logs
from edge_fl.config import Source
from edge_fl.console.progress import Progress
from edge_fl.errors import BudgetExhaustedError, ConfigError, DeadlineError, StoppedError
from edge_fl.files import atomic
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from server.mqtt.connector import denied
from server.mqtt.fleet import Limits, MqttFleet
from server.mqtt.journal import Journal
from server.mqtt.session import Server, connected
from server.orchestrate import simulate
from server.orchestrate.request import RunRequest, RunSetup, data_hash, prepare
from server.orchestrate.run import Run, conclude, plan, registered, remember
from server.registry import Database, releases, reports, runs
from server.registry.records import ReleaseRecord
from server.release import quantise, website
from server.release.export import Quantiser
from server.release.repository import Repository
from server.release.rollout.refusal import Refusal
from server.release.rollout.rollout import Rollout
from server.runs import checkpoint
from server.runs.checkpoint import Checkpoint
from server.runs.results import Results
from server.runs.totals import RunTotals
from server.training import rounds
from server.training import study as studies
from server.training.fleet import Fleet
from server.training.hybrid import HybridFleet
from server.training.rounds import RoundResult

log = logging.getLogger(__name__)


def run(request: RunRequest, finished: Callable[[Results], object] = lambda results: None) -> Path:
    """The whole run -> its results folder.

    Raises InputError before anything starts, ConnectError without a broker, DeadlineError when too few devices come, RunError when a round
    misses its quorum, SpentError when everything is written of a run that the privacy budget has ended early. KeyboardInterrupt ends it as
    "stopped"; whatever was measured by then is in the folder, and nothing is left on the broker that would keep devices at work.
    """
    recipe, resumed = request.recipe, request.resume
    saved = _saved(Results.open(resumed), recipe.rounds) if resumed else None
    setup = prepare(recipe)
    with ExitStack() as stack:
        db = stack.enter_context(closing(Database.open(request.registry)))
        strict, revoked = recipe.validation.quarantine_after, denied(recipe.broker.identity)
        journal = stack.enter_context(
            Journal(db, recipe.broker.fleet, quarantine_after=strict, denied=revoked)
        )
        server = stack.enter_context(
            connected(request.connect, journal, takeover=request.takeover, workers=request.workers)
        )
        after = (saved.round if saved else 0) if resumed else None
        results = (
            Results.resume(resumed, after=after)
            if resumed
            else Results.create(request.runs, recipe, data_hash=data_hash(setup))
        )
        logs.about(run=results.id)
        with registered(db, recipe, results), results, Progress() as progress:
            results.track(request.track, after=after)
            progress.say(
                f"run {results.path}: {setup.method.title} on {recipe.data.dataset}, source {recipe.source}"
            )
            spent = _run(setup, server, results, progress, saved, request.home)
            if spent:
                results.finish("budget_exhausted", str(spent))
    finished(results)
    if spent:
        raise spent
    return results.path


def _saved(results: Results, rounds: int) -> Checkpoint | None:
    """Where to go on; None for a run that ended before its first round did.

    Raises ArtefactError when nothing whole is left, ConfigError for a run that has completed.
    """
    saved = checkpoint.load(results.checkpoints) if checkpoint.begun(results.checkpoints) else None
    if saved and saved.round >= rounds and results.state().state == "completed":
        raise ConfigError(
            f"{results.path}: completed, with all its {rounds} rounds; expected a run that was interrupted"
        )
    return saved


def _run(
    setup: RunSetup,
    server: Server,
    results: Results,
    progress: Progress,
    saved: Checkpoint | None,
    home: Path,
) -> BudgetExhaustedError | None:
    """Says why the run ended before its last round, if it did."""
    totals = RunTotals()
    for kept in reports.of_run(server.journal.db, results.id):  # of the run's earlier life
        totals.note(kept.device, reports.report_of(kept))
    rollout = _rollout(setup, server, results.id, totals, progress, home)
    devices = _devices(setup, server, results.id, totals)
    fleet = FLEETS[setup.recipe.source](setup, devices, totals)
    try:
        run = Run(setup, server, results, totals, progress, rollout, devices, fleet)
        shared, spent = _train(run, saved)
        closing = _close(run, shared)
        return rounds.with_epsilon(spent, closing) if spent else None
    finally:
        devices.close()
        if rollout:
            rollout.close()
        conclude(results, setup.recipe, totals, server.roster.table)


def _rollout(
    setup: RunSetup, server: Server, run_id: str, totals: RunTotals, progress: Progress, home: Path
) -> Rollout | None:
    """What brings releases to head-only devices; None for a method that has none, and the devices are told."""
    recipe = setup.recipe
    if not setup.method.exports:
        progress.say(f"{setup.method.title} shares no extractor: head-only devices get nothing from this run")
        Refusal(server.roster, server.assignments, run_id, setup.method.title)
        return None
    repository = Repository(home / recipe.broker.fleet)
    if recipe.release.website:
        website.keep(repository, Path(recipe.release.website))
    return Rollout(
        server.connection,
        server.roster,
        server.inbox,
        server.assignments,
        repository,
        totals.note,
        setup.device,
        plan=recipe.release.rollout,
        db=server.journal.db,
        quantiser=_quantiser(setup, progress),
        watch=progress,
    )


def _devices(setup: RunSetup, server: Server, run_id: str, totals: RunTotals) -> MqttFleet:
    """The full devices, as the recipe's cohort and judge want them asked."""
    cohort, validation = setup.recipe.cohort, setup.recipe.validation
    late = cohort.max_staleness if cohort.buffer_size else None
    limits = Limits(cohort.deadline_s, max_growth=validation.max_growth, max_staleness=late)
    wire = server.connection, server.roster, server.inbox, server.assignments
    return MqttFleet(*wire, run_id, setup.spec, limits, totals.note, setup.device)


def _train(run: Run, saved: Checkpoint | None) -> tuple[Parts, BudgetExhaustedError | None]:
    """The rounds, with a release every so often -> (the shared parts after the last, why it was not the recipe's last)."""
    recipe, method = run.setup.recipe, run.setup.method
    shared = saved.shared if saved else steps.start(method)
    shared = to_device(shared, run.setup.device)
    if saved:
        run.progress.say(f"resumed after round {saved.round}")
        run.fleet.restore(saved.states())
    try:
        for result in _rounds(run, shared, saved.round + 1 if saved else 1):
            shared = result.shared
            remember(run, result)
            if result.round < recipe.rounds and _is_due(result.round, recipe.release.every):
                collect = not method.head_tier.closes
                _release(run, method.at(result.round), shared, result.round, collect=collect)
    except BudgetExhaustedError as spent:
        if not run.results.reached:
            raise
        run.progress.say(str(spent))
        return shared, spent
    return shared, None


def _close(run: Run, shared: Parts) -> Mapping[str, Mapping[str, float]]:
    """The closing steps and the last release -> metrics by client."""
    round = run.results.reached
    method = run.setup.method.at(max(round, 1))
    closes = method.head_tier.closes
    if closes and run.rollout:  # heads on the final extractor have their say in the closing step
        _release(run, method, shared, round, collect=True)
        _wait_for_heads(run, say=True)
    _wait_for_those_away(run)
    run.progress.say(f"closing steps on {len(run.fleet.clients())} clients")
    beside = (lambda: _beside(run)) if closes else (lambda: [])
    shared, closing = rounds.close(method, run.fleet, shared, round, beside, run.progress)
    run.totals.measure(closing)
    if run.rollout:
        _release(run, method, shared, round)
        _wait_for_heads(run, say=True)
    return closing


def _rounds(run: Run, shared: Parts, first: int) -> Iterator[RoundResult]:
    """The round loop, before each of whose rounds there are devices enough."""
    ready = partial(_wait_for_devices, run)
    beside = partial(_beside, run)
    for result in rounds.run(
        run.setup.method, run.fleet, plan(run.setup), shared, first, beside, ready, run.progress
    ):
        yield result
        _heed(run)


def _heed(run: Run) -> None:
    """Somebody else may have asked, through the registry, that this run ends. Raises StoppedError."""
    record = runs.get(run.server.journal.db, run.results.id)
    if record and record.desired == "stopped":
        raise StoppedError(f"run {run.results.id}: somebody asked it to end")


def _wait_for_devices(run: Run) -> None:
    recipe, roster = run.setup.recipe, run.server.roster
    needed = 0 if recipe.source == "simulated" else recipe.cohort.min_devices
    if len(roster.full_devices()) < needed:
        run.progress.say(f"waiting for {needed} full devices, {len(roster.full_devices())} there")
        roster.wait_for(full=needed, deadline_s=recipe.cohort.wait_s)


def _wait_for_those_away(run: Run) -> None:
    """Before the closing steps: a device that has just gone may be back in a moment, and has but this chance to personalise."""
    try:
        _wait_for_devices(run)
    except DeadlineError as error:
        run.progress.say(f"closing steps without the others: {error}")


def _beside(run: Run) -> list[Update]:
    """What head-only devices have sent back since this was last asked."""
    return run.rollout.head_updates.take() if run.rollout else []


def _release(run: Run, method: Method, shared: Parts, round: int, *, collect: bool = False) -> None:
    if run.rollout is None:
        return
    _wait_for_heads(run, say=False)
    spec, run_id = run.setup.spec, run.results.id
    manifest = run.rollout.release(method, shared, spec, run_id=run_id, round=round, collect=collect)
    method.net.to(run.setup.device)  # the export took it to the CPU
    atomic.write(
        run.results.artefacts / f"release-{manifest.release}.json",
        msgspec.json.format(msgspec.json.encode(manifest)),
    )
    journal = run.server.journal
    releases.note(
        journal.db,
        ReleaseRecord(
            journal.fleet,
            manifest.release,
            run.results.id,
            round,
            run.setup.recipe.method.name,
            manifest.extractor.sha256,
            manifest.extractor.bytes,
        ),
    )
    heads = len(run.server.roster.head_devices())
    run.progress.say(
        f"release {manifest.release} after round {round}: {manifest.extractor.bytes / 1024:.0f} KiB, for {heads} head-only devices"
    )


def _wait_for_heads(run: Run, *, say: bool) -> None:
    """Lets heads finish with the current release; those that do not are named, and the run goes on."""
    rollout, limits = run.rollout, run.setup.recipe.release
    if rollout is None or rollout.current is None:
        return
    if say and rollout.missing():
        run.progress.say(f"waiting for heads on release {rollout.current.release}")
    if say:
        _see_it_through(run, rollout)
    missing = rollout.wait(limits.heads, limits.wait_s)
    if missing:
        names = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        run.progress.say(
            f"release {rollout.current.release}: no report from {len(missing)} devices ({names}) in {limits.wait_s:g} s"
        )


def _see_it_through(run: Run, rollout: Rollout) -> None:
    """A run that is over stays until a roll-out in stages has come to rest, and says where when that is not the end."""
    stages = rollout.stages
    if stages is None or not stages.gated:
        return
    rollout.rest(len(stages.shares) * stages.plan.stage_wait_s)
    stages = rollout.stages or stages
    if stages.state != "completed":
        where = f"{stages.state} in stage {stages.stage + 1} of {len(stages.shares)}"
        run.progress.say(f"release {stages.release}: {where} ({stages.reason}); see 'edge-fl release list'")


def _quantiser(setup: RunSetup, progress: Progress) -> Quantiser | None:
    """What makes int8 variants, on the data that this server has: simulated clients', or else its own copy of the dataset."""
    gate = setup.recipe.release.quantise
    if not gate.int8:
        return None
    study = setup.study or studies.prepare(setup.recipe)
    return quantise.quantiser(list(study.data().values()), gate, setup.spec.seed, progress.say)


def _is_due(round: int, every: int) -> bool:
    """Whether a release comes after this round, the last one apart: 1, 1 + every, 1 + 2 * every, ..."""
    return every > 0 and (round - 1) % every == 0


def _simulated(setup: RunSetup, devices: Fleet, totals: RunTotals) -> Fleet:
    if setup.study is None:
        raise ConfigError(f"source {setup.recipe.source!r}: no clients to simulate")
    for client, data in setup.study.data().items():
        totals.enter(client, len(data.train))
    return simulate.fleet(setup.study, setup.method, setup.device)


FLEETS: dict[Source, Callable[[RunSetup, MqttFleet, RunTotals], Fleet]] = {
    "fleet": lambda setup, devices, totals: devices,
    "simulated": _simulated,
    "hybrid": lambda setup, devices, totals: HybridFleet(devices, _simulated(setup, devices, totals)),
}
"""Who trains, by source."""
