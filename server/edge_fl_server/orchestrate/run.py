"""Run a recipe: from its settings to a results folder that ends in one named state, simulated or with devices.

    recipe -> setup -> results folder -> clients -> execute (rounds, final personalisation) -> summary

The source names whose data the shared parts are trained on: `fleet` (on the devices; the server uses only the dataset's shape, mean, std
and class names, or those that the recipe declares), `simulated` (clients in this process), `hybrid` (both in one cohort) or `none`
(the extractor keeps its initial weights). With a broker, head-only devices get releases under all four.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_fl import logs, metrics
from edge_fl.config import MAX_CLASSES
from edge_fl.console import units
from edge_fl.console.output import print_status
from edge_fl.console.progress import Progress
from edge_fl.errors import ConfigError
from edge_fl.metrics import Summary, summarise_reports
from edge_fl_server.orchestrate import execution, own_code
from edge_fl_server.orchestrate.execution import RunResult, RunSetup, execute, simulated_clients
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs import checkpoint
from edge_fl_server.runs.checkpoint import Checkpoint
from edge_fl_server.runs.recorder import Recorder, RunTotals
from edge_fl_server.runs.results import Results, data_name
from edge_fl_server.runs.round_metrics import Opener
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.records import dropped_last
from edge_fl_server.training.rounds import CombinedHooks, RoundResult, RunHooks

if TYPE_CHECKING:
    from edge_fl_server.orchestrate.serving import FleetAccess


def run(
    recipe: Recipe,
    runs: Path = Path("runs"),
    *,
    access: FleetAccess | None = None,
    takeover: bool = False,
    resume: Path | None = None,
    track: Mapping[str, Opener] | None = None,
    hooks: RunHooks | None = None,
    resumption: Callable[[Results], str] | None = None,
) -> tuple[Results, RunResult]:
    """Run a recipe and write its results below `runs`; without `access` to a fleet it is a simulation in this process.

    `resume` is the folder of an interrupted run of this recipe, which goes on. `takeover`: replace a server that is online. `track` are
    additional trackers by name; `hooks` are called after the recorder's. `resumption` is the command that continues an interrupted run.

    Raises InputError before anything starts, ConnectError without a broker, DeadlineError when too few devices connect, RunError when a
    round misses its quorum. A run whose privacy budget ends early, or whose last release a gate stopped, is complete: `RunResult` has
    the error. KeyboardInterrupt ends the run as "stopped"; everything measured so far is in the folder, and no assignment to train
    remains on the broker.
    """
    begun = Results.open(resume) if resume else None
    saved = _checkpoint(begun, recipe) if begun else None
    setup = execution.prepare(recipe)
    if begun:
        setup = _continued(begun, setup)
    with ExitStack() as stack:
        devices = None
        if access:
            _require_few_classes(setup)
            own_code.require_exported(setup)
            if named := own_code.not_built_in(setup):
                print_status(
                    f"{named}: not part of edge-fl; a full device needs the package that has it, and without it reports bad_spec"
                )
            from edge_fl_server.orchestrate.devices import connected  # takes half a second

            devices = stack.enter_context(connected(access, setup, takeover=takeover))
        elif setup.study:
            if reason := own_code.export_obstacle(setup):
                print_status(f"{reason}; it can be simulated, but not be sent to devices")
            print_status(setup.study.histogram())
        after = (saved.round if saved else 0) if begun else None
        if begun:
            results = Results.resume(begun.path, after=after)
        else:
            results = Results.create(runs, setup.recipe, data_hash=setup.data_hash)
        logs.set_context(run=results.id)
        if devices:
            stack.enter_context(devices.registered(results))
        with results, Progress() as progress:
            results.track(track or {}, after=after)
            source = f"source {setup.recipe.source}"
            progress.print(f"run {results.path}: {setup.method.title} on {data_name(setup.recipe)}, {source}")
            if saved:
                progress.print(f"resumed after round {saved.round}")
            shown = CombinedHooks(_RoundLines(setup.recipe.rounds, progress), hooks or RunHooks())
            totals = _totals(setup, saved)
            try:
                outcome = (devices.execute if devices else _simulate)(
                    setup, results, totals, progress, saved, shown
                )
            except BaseException:
                if resumption and checkpoint.begun(results.checkpoints):
                    progress.print(f"to continue this run: {resumption(results)}")
                raise
            unmeasured = devices.unmeasured(results) if devices else ""
            if unmeasured:
                progress.print(unmeasured)
            reasons = [str(reason) for reason in (outcome.exhausted, outcome.stopped, unmeasured) if reason]
            results.finish("budget_exhausted" if outcome.exhausted else "completed", "; ".join(reasons))
    return results, outcome


class _RoundLines(RunHooks):
    """Print one line per round."""

    def __init__(self, rounds: int, progress: Progress) -> None:
        self._rounds, self._progress = rounds, progress

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        line = (
            f"round {result.round}/{self._rounds}: {len(result.responded)} of {len(result.selected)} clients"
        )
        line += f" responded, {result.seconds:.1f} s"
        for measured in accuracies(summarise_reports(list(result.metrics.values()))):
            line += f", {measured}"
        if result.verdict and result.verdict.outcome != "accepted":
            line += f"  {result.verdict.outcome}: {result.verdict}"
        if result.budget_exhausted:
            line += f"  privacy budget exhausted: {', '.join(result.budget_exhausted)}"
        self._progress.print(line)


SHOWN = {
    "personal": (metrics.PERSONAL_BEFORE, metrics.PERSONAL_LOCAL),
    "global": (metrics.GLOBAL_TEST,),
}
"""Word for an accuracy in the line of a round -> the metrics of which the first one measured is shown."""


def accuracies(measured: Mapping[str, Summary]) -> list[str]:
    """The accuracies of a round in words, each with its n: "personal 92.0 % (n = 12)"; equal ones once."""
    shown: dict[str, str] = {}
    for word, names in SHOWN.items():
        if found := next((measured[name] for name in names if name in measured), None):
            shown.setdefault(f"{units.percent(found.mean)} (n = {found.clients})", word)
    return [f"{word} {text}" for text, word in shown.items()]


def _simulate(
    setup: RunSetup,
    results: Results,
    totals: RunTotals,
    progress: Progress,
    saved: Checkpoint | None,
    hooks: RunHooks,
) -> RunResult:
    recorder = Recorder(results, setup.plan, totals, every_round=False)
    try:
        clients = simulated_clients(setup, progress.print, progress)
        return execute(setup, clients, CombinedHooks(recorder, hooks), progress, saved)
    finally:
        recorder.conclude({})


def _totals(setup: RunSetup, saved: Checkpoint | None) -> RunTotals:
    totals = RunTotals()
    for client, data in setup.study.data().items() if setup.study else ():
        totals.enter(client, len(data.train))
    for report in saved.evaluated.values() if saved else ():
        totals.measure(report)
    return totals


def _checkpoint(results: Results, recipe: Recipe) -> Checkpoint | None:
    """The checkpoint to resume from; None if the run ended before its first round did, or has no rounds.

    Raises ArtefactError if no intact checkpoint is left, ConfigError for a completed run.
    """
    completed, begun = results.state().state == "completed", checkpoint.begun(results.checkpoints)
    saved = checkpoint.load(results.checkpoints, final=False) if begun else None
    if completed and (saved.round if saved else 0) >= recipe.rounds:
        raise ConfigError(
            f"{results.path}: completed, with all its {recipe.rounds} rounds; expected an interrupted run"
        )
    if saved is None:
        return None
    lines = [line for line in results.rounds() if line.round <= saved.round]
    evaluated = {line.round: line.clients for line in lines if line.clients}
    return replace(
        saved,
        evaluated=evaluated,
        trained=frozenset(id for line in lines for id in line.responded),
        dropped=dropped_last([line.verdict for line in lines if not line.final]),
    )


def _continued(begun: Results, setup: RunSetup) -> RunSetup:
    """The setup with the engine that the run began with, because "auto" may choose another one today. Raises ConfigError for other data."""
    manifest = begun.manifest()
    if manifest.data_hash != setup.data_hash:
        raise ConfigError(
            f"{begun.path}: began with other data or another split ({manifest.data_hash[:8] or 'none'}, now {setup.data_hash[:8]});"
            " expected the same to resume"
        )
    if not manifest.engine:
        return setup
    recipe = msgspec.structs.replace(setup.recipe, engine=manifest.engine.partition(",")[0])
    return replace(setup, recipe=recipe, chosen=manifest.engine_timing)


def _require_few_classes(setup: RunSetup) -> None:
    """Raise ConfigError for more classes than a device accepts (`edge_fl.config.MethodSpec`)."""
    if (count := len(setup.spec.classes)) > MAX_CLASSES:
        raise ConfigError(
            f"dataset {data_name(setup.recipe)!r}: {count} classes, expected at most {MAX_CLASSES} for a run with devices",
            consequence="no run was started",
        )
