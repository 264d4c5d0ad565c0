"""A run, round by round: what was measured, who was asked and who answered, what was refused and why.

The registry has the counts and means; spread and worst tenth come from the run's folder, where the dashboard can read it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from msgspec import Struct
from sqlalchemy import func, select

from edge_fl.metrics import Summary
from server.registry import Database, runs
from server.registry.records import RoundRecord, RunRecord
from server.registry.tables import rejections, reports, requests
from server.runs import round_metrics

NEWEST_RUNS = 100


class RoundRow(Struct, frozen=True):
    """One round. `ended_badly` and `refused` count by reason; `summaries` are empty where the run's folder cannot be read."""

    record: RoundRecord
    summaries: dict[str, Summary] = {}
    ended_badly: dict[str, int] = {}
    refused: dict[str, int] = {}
    bytes: int = 0


class RunPage(Struct, frozen=True):
    """A run, its rounds in order, and the other runs that may be looked at, the newest first."""

    run: RunRecord
    rounds: tuple[RoundRow, ...]
    others: tuple[RunRecord, ...]
    under_way: dict[str, int] = {}
    closing: dict[str, Summary] = {}


def page(db: Database, fleet: str, run: str = "") -> RunPage | None:
    """A run of the fleet (the newest); None when there is none."""
    known = runs.listed(db, fleet)[:NEWEST_RUNS]
    chosen = next((record for record in known if record.run == run), None) or (
        known[0] if known and not run else None
    )
    if chosen is None:
        return None
    found = round_metrics.latest(round_metrics.lines(Path(chosen.folder) / round_metrics.FILE))
    summaries = {line.round: line.summaries for line in found if not line.closing}
    badly, refused = _badly(db, chosen.run), _refused(db, chosen.run)
    sent = _bytes(db, chosen.run)
    rows = tuple(
        RoundRow(
            record,
            summaries.get(record.round, {}),
            badly.get(record.round, {}),
            refused.get(record.round, {}),
            record.bytes_down + record.bytes_up or sent.get(record.round, 0),
        )
        for record in runs.rounds_of(db, chosen.run)
    )
    return RunPage(
        chosen,
        rows,
        tuple(known),
        _under_way(db, chosen.run),
        next((line.summaries for line in found if line.closing), {}),
    )


def _badly(db: Database, run: str) -> dict[int, Counter[str]]:
    """Tasks that did not succeed, by round: "timed_out" or the reason -> how many."""
    wanted = select(requests.c.round, requests.c.state, requests.c.reason, func.count()).where(
        requests.c.run == run, requests.c.state.in_(("failed", "timed_out", "removed"))
    )
    found: dict[int, Counter[str]] = {}
    with db.reading() as connection:
        for round, state, reason, count in connection.execute(
            wanted.group_by(requests.c.round, requests.c.state, requests.c.reason)
        ):
            found.setdefault(round, Counter())[reason if state == "failed" and reason else state] += count
    return found


def _refused(db: Database, run: str) -> dict[int, Counter[str]]:
    wanted = select(rejections.c.round, rejections.c.reason, func.count()).where(rejections.c.run == run)
    found: dict[int, Counter[str]] = {}
    with db.reading() as connection:
        for round, reason, count in connection.execute(
            wanted.group_by(rejections.c.round, rejections.c.reason)
        ):
            found.setdefault(round, Counter())[reason] += count
    return found


def _bytes(db: Database, run: str) -> dict[int, int]:
    total = func.sum(reports.c.bytes_down + reports.c.bytes_up)
    with db.reading() as connection:
        found = connection.execute(
            select(reports.c.round, total).where(reports.c.run == run).group_by(reports.c.round)
        )
        return {round: int(sent or 0) for round, sent in found}


def _under_way(db: Database, run: str) -> dict[str, int]:
    """The tasks of the newest round that was asked for, by state."""
    newest = select(func.max(requests.c.round)).where(requests.c.run == run).scalar_subquery()
    wanted = select(requests.c.state, func.count()).where(requests.c.run == run, requests.c.round == newest)
    with db.reading() as connection:
        return dict(connection.execute(wanted.group_by(requests.c.state)).all())
