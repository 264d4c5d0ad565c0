"""The audit log: who did what, known by what, on what, when, with which result. Rows can only be added; the database enforces it.

with audit.acting(db, "main", person, "admit", "pi-07"):
devices.readmit(db, "main", "pi-07")
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import ColumnElement, Text, case, cast, literal, select

from edge_fl.errors import MAX_REASON
from edge_fl.fleet.actions import CertificateAction
from edge_fl.wire.roles import LOCAL_USER, NotPermittedError, Person
from edge_fl_server.registry.database import Database, now
from edge_fl_server.registry.tables import AuditRecord, audit, rollouts

DONE = "done"
MAX_SHOWN = 1000
CERTIFICATES = ("enrol", "revoke", "rotate")
"""Actions on certificates, which the commands of the certificate authority note in a file."""
NEAR = timedelta(minutes=1)


@contextmanager
def acting(db: Database, fleet: str, person: Person, action: str, target: str = "") -> Iterator[None]:
    """Record the action of the block, also if it fails. Raises NotPermittedError, recorded too, if the roles do not include it."""
    result = "interrupted"
    try:
        person.require(action)
        yield
        result = DONE
    except Exception as error:
        result = str(error) or type(error).__name__
        raise
    finally:
        record(db, fleet, person, action, target, result)


def permit(db: Database, fleet: str, person: Person, action: str, target: str) -> None:
    """Raise NotPermittedError if the roles do not include an action that is about to be prepared; only this is recorded."""
    try:
        person.require(action)
    except NotPermittedError as error:
        record(db, fleet, person, action, target, str(error))
        raise


def record(db: Database, fleet: str, person: Person, action: str, target: str, result: str = DONE) -> None:
    """Add a row."""
    row = {
        "at": now(),
        "fleet": fleet,
        "who": person.name,
        "known_by": person.known_by,
        "action": action,
        "target": target,
        "result": result[:MAX_REASON],
    }
    with db.writing() as connection:
        connection.execute(audit.insert(), row)


def enter(db: Database, fleet: str, actions: Iterable[CertificateAction]) -> None:
    """Add what people did with certificates, once. What the same person did from the dashboard at that time has its row already."""
    mine = (audit.c.fleet == fleet) & audit.c.action.in_(CERTIFICATES)
    query = select(audit.c.at, audit.c.who, audit.c.action, audit.c.target).where(mine)
    with db.writing() as connection:
        known = [tuple(row) for row in connection.execute(query)]
        for each in actions:
            row = (each.at, each.who, each.action, each.target)
            times = [other[0] for other in known if other[1:] == row[1:]]
            if any(abs(datetime.fromisoformat(each.at) - datetime.fromisoformat(at)) < NEAR for at in times):
                continue
            values = msgspec.to_builtins(each)
            connection.execute(
                audit.insert(), {**values, "fleet": fleet, "known_by": LOCAL_USER, "result": DONE}
            )


def asked_by() -> ColumnElement[str]:
    """Who asked for the roll-out, or for its roll-back, of a row of `rollouts` on extractors; NULL for those of runs."""
    name = literal("release ") + cast(rollouts.c.release, Text)
    release, number = cast(rollouts.c.release, Text), cast(rollouts.c.number, Text)
    steered = (audit.c.action == "rollback") & audit.c.target.in_([name, number])
    started = (audit.c.action == "start") & audit.c.target.in_([name, release])
    started |= (audit.c.action == "rollback") & audit.c.target.in_([name, release])
    meanwhile = (audit.c.at >= rollouts.c.created_at) & (audit.c.at <= rollouts.c.changed_at)
    which = case((rollouts.c.state == "rolled_back", steered), else_=started)
    mine = (audit.c.fleet == rollouts.c.fleet) & (audit.c.result == DONE) & meanwhile & which
    query = select(audit.c.who).where(mine, rollouts.c.subject == "extractor").order_by(audit.c.number)
    return query.limit(1).correlate(rollouts).scalar_subquery()


def askers(db: Database, fleet: str) -> dict[int, str]:
    """Number of a roll-out -> who asked for it."""
    query = select(rollouts.c.number, asked_by()).where(rollouts.c.fleet == fleet)
    return {number: who for number, who in db.pairs(query).items() if who}


def listed(
    db: Database, fleet: str, *, since: str = "", who: str = "", limit: int = MAX_SHOWN
) -> list[AuditRecord]:
    """The rows since a time (ISO, UTC) and of one person, newest first."""
    query = select(audit).where(audit.c.fleet == fleet, audit.c.at >= since)
    if who:
        query = query.where(audit.c.who == who)
    return db.find(query.order_by(audit.c.at.desc(), audit.c.number.desc()).limit(limit), AuditRecord)
