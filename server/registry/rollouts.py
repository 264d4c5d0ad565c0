"""Roll-outs in the registry: anybody may write what is desired, the server that runs one writes how it stands.

number = rollouts.begin(db, "main", release=7, previous=6, plan={"stages": [0.05, 0.25, 1.0]})
rollouts.steer(db, number, "paused")            # the command line, the dashboard
rollouts.advance(db, rollout, state="paused")   # the running server, once it is so
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import select, update

from server.registry.database import Database, now
from server.registry.records import RolloutDesire, RolloutRecord, RolloutWord
from server.registry.tables import rollouts

OVER: frozenset[RolloutWord] = frozenset({"completed", "aborted", "rolled_back", "failed"})


def begin(
    db: Database, fleet: str, release: int, *, previous: int = 0, plan: dict[str, Any] | None = None
) -> int:
    """A release starts on its way to the devices -> its number."""
    record = RolloutRecord(0, fleet, release, previous, plan or {}, created_at=now(), changed_at=now())
    row = msgspec.to_builtins(record)
    del row["number"]
    with db.writing() as connection:
        made = connection.execute(rollouts.insert(), row).inserted_primary_key
        return int(made[0]) if made else 0


def steer(db: Database, number: int, desired: RolloutDesire) -> bool:
    """Writes what is wanted of a roll-out; False when there is none of this number."""
    with db.writing() as connection:
        changed = connection.execute(
            update(rollouts)
            .where(rollouts.c.number == number)
            .values(desired=desired, version=rollouts.c.version + 1, changed_at=now())
        )
        return changed.rowcount > 0


def advance(
    db: Database,
    seen: RolloutRecord,
    *,
    state: RolloutWord | None = None,
    stage: int | None = None,
    reason: str | None = None,
) -> RolloutRecord | None:
    """Writes how a roll-out stands, as changed from `seen` -> as it is now; None when somebody has changed it since: read it again."""
    changed = msgspec.structs.replace(
        seen,
        state=seen.state if state is None else state,
        stage=seen.stage if stage is None else stage,
        reason=seen.reason if reason is None else reason,
        version=seen.version + 1,
        changed_at=now(),
    )
    values = {name: getattr(changed, name) for name in ("state", "stage", "reason", "version", "changed_at")}
    with db.writing() as connection:
        done = connection.execute(
            update(rollouts)
            .where(rollouts.c.number == seen.number, rollouts.c.version == seen.version)
            .values(**values)
        )
        return changed if done.rowcount else None


def get(db: Database, number: int) -> RolloutRecord | None:
    """One roll-out."""
    return next(iter(db.find(select(rollouts).where(rollouts.c.number == number), RolloutRecord)), None)


def listed(db: Database, fleet: str) -> list[RolloutRecord]:
    """The roll-outs of a fleet, the newest first."""
    wanted = select(rollouts).where(rollouts.c.fleet == fleet).order_by(rollouts.c.number.desc())
    return db.find(wanted, RolloutRecord)


def current(db: Database, fleet: str) -> RolloutRecord | None:
    """The newest roll-out that is not over; what the running server looks at."""
    return next((found for found in listed(db, fleet) if found.state not in OVER), None)
