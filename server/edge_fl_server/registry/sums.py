"""The last secure sum of each device of which a vector arrived, by the number of the signature that opened it."""

from __future__ import annotations

from sqlalchemy import select

from edge_fl_server.registry.database import Database
from edge_fl_server.registry.tables import sums


def last(db: Database, fleet: str) -> dict[str, int]:
    """The number by device; only devices that have one."""
    with db.reading() as connection:
        rows = connection.execute(select(sums.c.device, sums.c.opened).where(sums.c.fleet == fleet))
        return {row[0]: row[1] for row in rows}


def record(db: Database, fleet: str, device: str, opened: int) -> None:
    """Store the number of a later sum; 0, of one that was not signed, stores nothing."""
    if opened:
        with db.writing() as connection:
            db.upsert(connection, sums, [{"fleet": fleet, "device": device, "opened": opened}])
