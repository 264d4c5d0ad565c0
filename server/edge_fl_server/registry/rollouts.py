"""Releases and their roll-outs in the registry. Any process may write a desired state, the server that runs the roll-out the actual one.

number = rollouts.begin(db, "main", release=7, previous=6, plan={"stages": [0.05, 0.25, 1.0]})
rollouts.steer(db, number, "paused")            # the command line, the dashboard
rollouts.advance(db, rollout, state="paused")   # the running server, once it has paused
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import select, update

from edge_fl.release.manifests import Manifest
from edge_fl_server.registry.database import Database, now
from edge_fl_server.registry.tables import (
    DesiredRolloutState,
    ReleaseRecord,
    RolloutRecord,
    RolloutState,
    Subject,
    releases,
    rollouts,
)

OVER: frozenset[RolloutState] = frozenset({"completed", "aborted", "rolled_back", "replaced"})


def begin(
    db: Database,
    fleet: str,
    release: int,
    *,
    previous: int = 0,
    plan: dict[str, Any] | None = None,
    subject: Subject = "extractor",
) -> int:
    """Start the roll-out of a release -> its number."""
    begun_at = now()
    record = RolloutRecord(
        0, fleet, release, previous, plan or {}, created_at=begun_at, changed_at=begun_at, subject=subject
    )
    row = msgspec.to_builtins(record)
    del row["number"]
    with db.writing() as connection:
        key = connection.execute(rollouts.insert(), row).inserted_primary_key
        return int(key[0]) if key else 0


def steer(db: Database, number: int, desired: DesiredRolloutState) -> bool:
    """Set the desired state of a roll-out; False if it does not exist."""
    changes = {"desired": desired, "version": rollouts.c.version + 1, "changed_at": now()}
    return db.change(update(rollouts).where(rollouts.c.number == number).values(**changes)) > 0


def advance(db: Database, seen: RolloutRecord, **fields: Any) -> RolloutRecord | None:
    """Change `state`, `stage` or `reason` of a roll-out -> the new record; None if it has changed since `seen` was read."""
    changes = {**fields, "version": seen.version + 1, "changed_at": now()}
    unchanged = (rollouts.c.number == seen.number) & (rollouts.c.version == seen.version)
    changed = db.change(update(rollouts).where(unchanged).values(**changes))
    return msgspec.structs.replace(seen, **changes) if changed else None


def get(db: Database, number: int) -> RolloutRecord | None:
    """One roll-out."""
    return db.one(select(rollouts).where(rollouts.c.number == number), RolloutRecord)


def listed(db: Database, fleet: str, subject: Subject = "extractor") -> list[RolloutRecord]:
    """The roll-outs of a fleet, newest first."""
    mine = (rollouts.c.fleet == fleet) & (rollouts.c.subject == subject)
    return db.find(select(rollouts).where(mine).order_by(rollouts.c.number.desc()), RolloutRecord)


def served_release(db: Database, fleet: str, subject: Subject = "extractor") -> int:
    """The release that a whole fleet serves (0: none): the one to go back to from a new release."""
    for record in listed(db, fleet, subject):
        if record.where:
            continue
        if record.state == "completed":
            return record.release
        if record.previous:
            return record.previous
    return 0


def previous_release(db: Database, fleet: str, release: int, subject: Subject = "extractor") -> int:
    """The release to go back to from `release` (0: none); from the one that is served, it stays that of its earlier roll-out."""
    served = served_release(db, fleet, subject)
    if served != release:
        return served
    earlier = (one for one in listed(db, fleet, subject) if one.release == release)
    return next((one.previous for one in earlier if one.previous), 0)


def left_release(db: Database, fleet: str, served: int) -> int:
    """The release from which a roll-back returned the whole fleet to the one that it serves (0: it came by no roll-back)."""
    for record in listed(db, fleet):
        to = {"completed": record.release, "rolled_back": record.previous}.get(record.state, 0)
        if to == served and not record.where:
            return record.leaves
    return 0


def rolled_back(records: Iterable[RolloutRecord]) -> frozenset[int]:
    """The releases that a roll-back left, of roll-outs newest first, if they were not rolled out again afterwards."""
    left: dict[int, bool] = {}
    for record in records:
        if record.state in ("completed", "rolled_back") and not record.where:
            left.setdefault(record.leaves, True)
            left.setdefault(record.release, False)
    return frozenset(release for release, back in left.items() if back and release)


def current(db: Database, fleet: str, subject: Subject = "extractor") -> RolloutRecord | None:
    """The newest roll-out that has not ended."""
    return next((record for record in listed(db, fleet, subject) if record.state not in OVER), None)


def record_release(db: Database, release: ReleaseRecord) -> None:
    """Store a published release; publishing it again (a rollback) replaces its row."""
    row = {**msgspec.to_builtins(release), "published_at": release.published_at or now()}
    db.put(releases, [row])


def published(fleet: str, manifest: Manifest) -> ReleaseRecord:
    """The record of a release that is published now."""
    return ReleaseRecord(
        fleet=fleet,
        release=manifest.release,
        run=manifest.run_id,
        round=manifest.round,
        method=manifest.method,
        extractor=manifest.extractor.sha256,
        bytes=manifest.bytes,
    )


def releases_of(db: Database, fleet: str) -> list[ReleaseRecord]:
    """The releases of a fleet, newest first."""
    query = select(releases).where(releases.c.fleet == fleet).order_by(releases.c.release.desc())
    return db.find(query, ReleaseRecord)
