"""A run in the registry: its entry, its rounds, and the request to stop it."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan

from edge_fl.errors import StoppedError
from edge_fl.metrics import summarise_reports
from edge_fl.wire.roles import local_person
from edge_fl_server.registry import Database, audit, runs
from edge_fl_server.registry.records import RoundRecord, RunRecord
from edge_fl_server.runs.results import Results, data_name
from edge_fl_server.training.rounds import RoundResult


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
            result.bytes_down,
            result.bytes_up,
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
