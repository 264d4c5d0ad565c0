"""How a fleet was over time: a row of figures every ten seconds, of which older ones are thinned out, at most about 2,900 per fleet."""

from collections.abc import Iterable

import msgspec
from sqlalchemy import delete, select

from edge_fl_server.registry.database import Database
from edge_fl_server.registry.tables import HistoryRecord, history

HOUR_S, DAY_S = 3600, 86_400
STEP_S = 10
STEPS_S = {HOUR_S: STEP_S, 7 * DAY_S: 600, 365 * DAY_S: 21_600}
"""Age -> seconds between the rows that are kept up to it; older ones are deleted."""


def record(db: Database, row: HistoryRecord) -> None:
    """Store a row; another one of the same STEP_S seconds is replaced."""
    at_s = row.at_s - row.at_s % STEP_S
    db.put(history, [{**msgspec.to_builtins(row), "at_s": at_s}])


def since(db: Database, fleet: str, at_s: int) -> list[HistoryRecord]:
    """The rows since a time, oldest first."""
    mine = (history.c.fleet == fleet) & (history.c.at_s >= at_s)
    return db.find(select(history).where(mine).order_by(history.c.at_s), HistoryRecord)


def thin(db: Database, fleet: str, now_s: int) -> None:
    """Delete rows so that those that are left have the distances of STEPS_S."""
    rows = db.rows(select(history.c.at_s).where(history.c.fleet == fleet).order_by(history.c.at_s))
    obsolete = _obsolete([row.at_s for row in rows], now_s)
    if obsolete:
        db.change(delete(history).where(history.c.fleet == fleet, history.c.at_s.in_(obsolete)))


def step_s(age_s: float) -> int:
    """Seconds between the rows of this age."""
    return next((step for oldest, step in STEPS_S.items() if age_s <= oldest), 0)


def _obsolete(times: Iterable[int], now_s: int) -> list[int]:
    """The times that are not the first of their step."""
    obsolete, last = [], (0, -1)
    for at_s in times:
        step = step_s(now_s - at_s)
        place = (step, at_s // step) if step else last
        if place == last or not step:
            obsolete.append(at_s)
        last = place
    return obsolete
