"""A run under way: what it consists of, and what it writes down as it goes: in its results folder, in checkpoints, in the registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isnan

import msgspec

from edge_fl.config import Recipe
from edge_fl.console.progress import Progress
from edge_fl.metrics import Summary, summarise_reports
from server.mqtt.devices.roster import Table
from server.mqtt.fleet import MqttFleet
from server.mqtt.session import Server
from server.orchestrate import simulate
from server.orchestrate.request import RunSetup
from server.registry import Database, runs
from server.registry.records import RoundRecord, RunRecord
from server.release.rollout.rollout import Rollout
from server.runs import checkpoint
from server.runs.results import Results
from server.runs.totals import RunTotals
from server.training import rounds
from server.training.fleet import Fleet
from server.training.rounds import RoundResult


@dataclass(frozen=True)
class Run:
    """A run under way."""

    setup: RunSetup
    server: Server
    results: Results
    totals: RunTotals
    progress: Progress
    rollout: Rollout | None
    devices: MqttFleet
    fleet: Fleet
    seen: Counter[str] = field(default_factory=Counter)

    def refused(self) -> dict[str, int]:
        """Reports and packets that did not count since this was last asked, by name: late, twice, foreign, malformed, ..."""
        counts = self.server.inbox.counts
        new = counts - self.seen
        self.seen.update(new)
        return {name: count for name, count in sorted(new.items()) if name != "accepted"}


def plan(setup: RunSetup) -> rounds.Plan:
    """The recipe's plan; a method that has no model before its closing step is not evaluated in between."""
    found = simulate.plan(setup.recipe)
    measurable = setup.method.predicts_early or setup.method.has_global
    return found if measurable else replace(found, evaluate_every=0)


def remember(run: Run, result: RoundResult) -> None:
    """Writes down one round, and all that it takes to go on after it."""
    summaries = summarise_reports(list(result.metrics.values()))
    run.totals.measure(result.metrics)
    run.results.append_round(_record(result, summaries, run.refused()))
    checkpoint.save(
        run.results.checkpoints, result.round, plan(run.setup), result.shared, run.fleet.personal_state()
    )
    means = {name: None if isnan(summary.mean) else summary.mean for name, summary in summaries.items()}
    runs.note_round(
        run.server.journal.db,
        RoundRecord(
            run.results.id,
            result.round,
            len(result.asked),
            len(result.answered),
            result.seconds,
            result.bytes_down,
            result.bytes_up,
            means,
        ),
    )
    run.progress.say(
        f"round {result.round}/{run.setup.recipe.rounds}: {len(result.answered)} of {len(result.asked)} answered, {result.seconds:.1f} s"
    )


def conclude(results: Results, recipe: Recipe, totals: RunTotals, table: Table) -> None:
    """What everybody reported over the run, however it ended."""
    results.write_summary(recipe.source, totals.summaries(table))
    rows = [msgspec.to_builtins(row) for row in totals.rows(table)]
    results.write_devices(rows)
    results.append_round(
        {"round": results.reached, "closing": True, "metrics": totals.measured(), "devices": rows}
    )


def _record(result: RoundResult, summaries: dict[str, Summary], refused: dict[str, int]) -> dict[str, object]:
    return {
        "round": result.round,
        "asked": len(result.asked),
        "answered": len(result.answered),
        "heads": len(result.beside),
        "attempts": result.attempts,
        "late": len(result.staleness),
        "staleness": max(result.staleness.values(), default=0),
        "refused": refused,
        "budget_exhausted": list(result.spent),
        "seconds": round(result.seconds, 3),
        "bytes_down": result.bytes_down,
        "bytes_up": result.bytes_up,
        **{name: msgspec.to_builtins(summary) for name, summary in summaries.items()},
    }


@contextmanager
def registered(db: Database, recipe: Recipe, results: Results) -> Iterator[None]:
    """The run in the registry while it goes on, and then in the word that its folder ends in."""
    names = (recipe.broker.fleet, recipe.method.name, recipe.data.dataset, recipe.source, recipe.rounds)
    runs.begin(db, RunRecord(results.id, *names, str(results.path.absolute())))
    try:
        yield
    finally:
        state = Results.open(results.path).state()
        if state.state != "running":
            runs.end(db, results.id, state.state, state.reason)
