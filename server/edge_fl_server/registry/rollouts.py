"""Releases and their roll-outs in the registry. Any process may write a desired state, the server that runs the roll-out the actual one.

number = rollouts.begin(db, "main", release=7, previous=6, plan={"stages": [0.05, 0.25, 1.0]})
rollouts.steer(db, number, "paused")            # the command line, the dashboard
rollouts.advance(db, rollout, state="paused")   # the running server, once it has paused
"""

from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import select, update

from edge_fl.errors import InputError
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

NO_RUN = "none"
"""The run of a release that no run trained."""
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
    """The release to go back to from `release` (0: none): the served one, and from the served one the newest older good one."""
    served = served_release(db, fleet, subject)
    return served if served != release else max(_good(listed(db, fleet, subject), release), default=0)


class WayBack(Struct, frozen=True):
    """The roll-back of a whole fleet: from the release `leaves` to the release `to`."""

    leaves: int
    to: int


def way_back(db: Database, fleet: str, release: int = 0, kept: Collection[int] | None = None) -> WayBack:
    """The roll-back to `release`, by default to the newest older release that is good: the whole fleet has served it, and it was not
    withdrawn. During a roll-out the fleet leaves its release; a roll-back that is under way goes on.

    kept: the releases whose files exist; None: unknown. Raises InputError if there is no such release.
    """
    records, served = listed(db, fleet), served_release(db, fleet)
    unfinished, leaves = current(db, fleet), served
    if unfinished:
        leaves = unfinished.leaves or unfinished.release
        if unfinished.leaves and release in (0, unfinished.release):
            return WayBack(leaves, unfinished.release)
    elif (newest := next((one for one in records if one.state == "completed"), None)) and newest.where:
        leaves = max(newest.release, served)  # some devices have another release than the fleet
    taken_back = withdrawn(records)
    found = _good(records, leaves) | ({served} if 0 < served < leaves else set())
    if release:
        if release == served == leaves:
            raise InputError(f"release {release}: the fleet serves it already")
        if release >= leaves:
            raise InputError(
                f"release {release}: not older than release {leaves}, expected an older one;"
                f" to roll it out: edge-fl release rollout {release}"
            )
        if release in taken_back:
            raise InputError(
                f"release {release}: {taken_back[release].withdrawal}; expected one that was not"
            )
        found = {release}
    usable = found if kept is None else found & {*kept}
    if not usable:
        reasons = {number: record.withdrawal for number, record in taken_back.items() if number < leaves}
        reasons |= dict.fromkeys(found, "its files are not kept")
        because = "".join(
            f"; release {number}: {reasons[number]}" for number in sorted(reasons, reverse=True)
        )
        raise InputError(
            f"fleet {fleet!r}: no older release than {leaves} to go back to{because}"
            if leaves
            else f"fleet {fleet!r}: no release was rolled out to it, so there is none to go back to"
        )
    return WayBack(leaves, max(usable))


def _good(records: Collection[RolloutRecord], below: int) -> set[int]:
    """The releases below this number that a whole fleet has served, and that were not withdrawn."""
    completed = {record.release for record in records if record.state == "completed" and not record.where}
    return {release for release in completed - withdrawn(records).keys() if release < below}


def titled(db: Database, fleet: str, release: int) -> str:
    """A release with what it is: its method, where it is from and when it was published."""
    query = select(releases).where(releases.c.fleet == fleet, releases.c.release == release)
    if (record := db.one(query, ReleaseRecord)) is None:
        return f"release {release}"
    origin = "from no run" if record.run == NO_RUN else f"round {record.round} of {record.run}"
    at = record.published_at[:16].replace("T", " ")
    return f"release {release} ({record.method}, {origin}, published {at} UTC)"


def left_release(db: Database, fleet: str, served: int) -> int:
    """The release from which a roll-back returned the whole fleet to the one that it serves (0: it came by no roll-back)."""
    for record in listed(db, fleet):
        to = {"completed": record.release, "rolled_back": record.previous}.get(record.state, 0)
        if to == served and not record.where:
            return record.leaves
    return 0


def withdrawn(records: Iterable[RolloutRecord]) -> dict[int, RolloutRecord]:
    """Release -> the roll-out in which it was aborted or rolled back, or the roll-back that left it, of roll-outs newest first.

    Without releases that were rolled out again afterwards. A roll-back that a person aborts says nothing about the release that it is to.
    """
    newest: dict[int, RolloutRecord | None] = {}
    for record in records:
        if record.state == "completed":
            newest.setdefault(record.release, None)
            if record.leaves and not record.where:
                newest.setdefault(record.leaves, record)
        elif record.state == "rolled_back" or (
            record.state == "aborted" and (record.by_gate or not record.leaves)
        ):
            newest.setdefault(record.release, record)
    return {release: record for release, record in newest.items() if record and release}


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
