"""Releases in the registry: which run and round each came from."""

from __future__ import annotations

import msgspec
from sqlalchemy import select

from server.registry.database import Database, now
from server.registry.records import ReleaseRecord
from server.registry.tables import releases


def note(db: Database, record: ReleaseRecord) -> None:
    """A release was published; published again (a rollback), it stays one release."""
    with db.writing() as connection:
        row = {**msgspec.to_builtins(record), "published_at": record.published_at or now()}
        db.put(connection, releases, [row])


def listed(db: Database, fleet: str) -> list[ReleaseRecord]:
    """The releases of a fleet, the newest first."""
    wanted = select(releases).where(releases.c.fleet == fleet).order_by(releases.c.release.desc())
    return db.find(wanted, ReleaseRecord)
