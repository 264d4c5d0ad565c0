"""A run by round: metrics, selected and responding clients, dropped and rejected reports.

Counts and means come from the registry, std and bottom decile from the run's folder where the dashboard can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from pathlib import Path

from msgspec import Struct
from sqlalchemy import ColumnElement, Table, case, func, select

from edge_fl.metrics import PERSONAL_AFTER, PERSONAL_BEFORE, Summary
from edge_fl_server.registry import Database, runs
from edge_fl_server.registry.records import RoundRecord, RunRecord
from edge_fl_server.registry.tables import rejections, requests
from edge_fl_server.runs import round_metrics

NEWEST_RUNS = 100
PERSONAL = (PERSONAL_AFTER, PERSONAL_BEFORE)
UNMEASURED = Summary(nan, nan, nan, nan, 0)
DROPPED = case(
    ((requests.c.state == "failed") & (requests.c.reason != ""), requests.c.reason),
    (requests.c.state.in_(("failed", "timed_out", "cancelled")), requests.c.state),
    else_="",
)
"""Why a request had no success; "" for all others."""


class RoundRow(Struct, frozen=True):
    """One round. `dropped` and `rejected` count by reason; `summaries` is empty if the run's folder cannot be read."""

    record: RoundRecord
    summaries: Mapping[str, Summary] = {}
    dropped: dict[str, int] = {}
    rejected: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes transferred in both directions."""
        return self.record.bytes_down + self.record.bytes_up

    def mean(self, *names: str) -> float | None:
        """The mean of the first of these metrics that was measured."""
        for name in names:
            if name in self.summaries:
                return self.summaries[name].mean
            if self.record.metrics.get(name) is not None:
                return self.record.metrics[name]
        return None

    @property
    def spread(self) -> Summary:
        """The summary of the personal accuracy; NaN if it was not measured."""
        return next((self.summaries[name] for name in PERSONAL if name in self.summaries), UNMEASURED)


class RunPage(Struct, frozen=True):
    """A run, its rounds in order, and the fleet's runs, the newest first.

    `current` counts the requests of the current round by state; `final` are the metrics of the final personalisation.
    """

    run: RunRecord
    rounds: tuple[RoundRow, ...]
    others: tuple[RunRecord, ...]
    current: dict[str, int] = {}
    final: Mapping[str, Summary] = {}


def page(db: Database, fleet: str, run: str = "") -> RunPage | None:
    """A run of the fleet, by default the newest; None if there is none."""
    known = runs.listed(db, fleet)[:NEWEST_RUNS]
    record = next((one for one in known if run in ("", one.run)), None)
    if record is None:
        return None
    lines = round_metrics.latest(round_metrics.lines(Path(record.folder) / round_metrics.FILE))
    summaries = {line.round: line.metrics for line in lines if not line.final}
    dropped = _by_round(db, record.run, requests, DROPPED)
    rejected = _by_round(db, record.run, rejections, rejections.c.reason)
    rows = tuple(
        RoundRow(
            one,
            summaries.get(one.round, {}),
            dropped.get(one.round, {}),
            rejected.get(one.round, {}),
        )
        for one in runs.rounds_of(db, record.run)
    )
    final = next((line.metrics for line in lines if line.final), {})
    return RunPage(record, rows, tuple(known), _current(db, record.run), final)


def _by_round(db: Database, run: str, table: Table, reason: ColumnElement[str]) -> dict[int, dict[str, int]]:
    """Round -> reason -> number of rows of a run."""
    query = (
        select(table.c.round, reason, func.count()).where(table.c.run == run).group_by(table.c.round, reason)
    )
    counts: dict[int, dict[str, int]] = {}
    with db.reading() as connection:
        for round, name, count in connection.execute(query):
            if name:
                counts.setdefault(round, {})[name] = count
    return counts


def _current(db: Database, run: str) -> dict[str, int]:
    newest = select(func.max(requests.c.round)).where(requests.c.run == run).scalar_subquery()
    query = select(requests.c.state, func.count()).where(requests.c.run == run, requests.c.round == newest)
    with db.reading() as connection:
        return dict(connection.execute(query.group_by(requests.c.state)).all())
