"""What several server processes share of a round under way: the open requests, and the answers as they come together piece by piece.

One process, the coordinator, runs the rounds; any number of workers take reports off the broker, judge them and acknowledge them. A
report and its pieces may reach different workers: here they meet. Whoever brings the last one judges, inside one transaction, so that
a worker that dies leaves nothing half done and what it had not acknowledged is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from sqlalchemy import delete, select, update

from edge_fl.wire.messages import Mode, Report
from server.registry.database import Database
from server.registry.tables import letters, pieces, questions

HEADS = "rel-"  # how the ids of heads' reports begin; they belong to a release, not to a request
MAX_PIECES = 8192  # per report; more are dropped
ReportState = Literal["open", "accepted", "rejected", "passed"]


class CohortRequest(Struct, frozen=True):
    """What a cohort was asked, as far as a worker needs it to judge the answers."""

    fleet: str
    id: str
    run: str
    round: int
    mode: Mode
    cohort: list[str]
    terms: dict[str, Any]  # `server.mqtt.updates.validation.Terms`, which only judges can read


class SharedReport(Struct, frozen=True):
    """A report that was handed in, with its whole blob once it has been judged. "passed" leaves the judgement to the coordinator."""

    number: int
    device: str
    id: str
    run: str
    round: int
    report: Report
    state: ReportState = "open"
    reason: str = ""
    payload: bytes | None = None


Judge = Callable[[Report, Mapping[int, bytes]], tuple[ReportState, str] | None]
"""(report, pieces) -> the verdict and its reason; None while something is missing."""


def ask(db: Database, request: CohortRequest) -> None:
    """From now on answers to this request are taken."""
    with db.writing() as connection:
        row = {"fleet": request.fleet, "id": request.id, "content": msgspec.to_builtins(request)}
        db.put(connection, questions, [row])


def clear(db: Database, fleet: str) -> None:
    """Throws away the requests that an earlier coordinator left open, and what came of the answers."""
    with db.writing() as connection:
        for table in (pieces, letters):
            passing = ~table.c.id.startswith(HEADS)
            connection.execute(delete(table).where(table.c.fleet == fleet, passing))
        connection.execute(delete(questions).where(questions.c.fleet == fleet))


def close(db: Database, fleet: str, id: str) -> None:
    """From now on answers to this request are late."""
    with db.writing() as connection:
        connection.execute(delete(questions).where(questions.c.fleet == fleet, questions.c.id == id))
        for table in (pieces, letters):
            connection.execute(delete(table).where(table.c.fleet == fleet, table.c.id == id))


def asked(db: Database, fleet: str, id: str) -> CohortRequest | None:
    """The open request of this id."""
    wanted = select(questions.c.content).where(questions.c.fleet == fleet, questions.c.id == id)
    with db.reading() as connection:
        content = connection.execute(wanted).scalar()
    return msgspec.convert(content, CohortRequest) if content else None


def keep_report(db: Database, fleet: str, device: str, run: str, round: int, report: Report) -> None:
    """Hands a report in; a second one of its id changes nothing."""
    row = {
        "fleet": fleet,
        "device": device,
        "id": report.id,
        "run": run,
        "round": round,
        "report": msgspec.to_builtins(report),
        "state": "open",
        "reason": "",
        "payload": None,
    }
    with db.writing() as connection:
        db.add(connection, letters, row)


def keep_piece(db: Database, fleet: str, device: str, id: str, index: int, payload: bytes) -> None:
    """Hands one chunk in."""
    if index < MAX_PIECES:
        row = {"fleet": fleet, "device": device, "id": id, "index": index, "payload": payload}
        with db.writing() as connection:
            db.add(connection, pieces, row)


def settle(db: Database, fleet: str, device: str, id: str, judge: Judge) -> tuple[SharedReport, str] | None:
    """Judges a report if it is whole and nobody has -> the report as it was judged, and the reason; None if there is nothing to do.

    Two workers that ask at once take turns: the second finds it judged.
    """
    mine = (letters.c.fleet == fleet) & (letters.c.device == device) & (letters.c.id == id)
    its = (pieces.c.fleet == fleet) & (pieces.c.device == device) & (pieces.c.id == id)
    with db.writing() as connection:
        row = connection.execute(
            select(letters).where(mine, letters.c.state == "open").with_for_update()
        ).first()
        if row is None:
            return None
        found = connection.execute(select(pieces.c.index, pieces.c.payload).where(its)).all()
        chunks = {int(index): bytes(payload) for index, payload in found}
        report = msgspec.convert(row.report, Report)
        if (verdict := judge(report, chunks)) is None:
            return None
        state, reason = verdict
        payload = b"".join(chunks[index] for index in sorted(chunks)) if state != "rejected" else None
        connection.execute(update(letters).where(mine).values(state=state, reason=reason, payload=payload))
        connection.execute(delete(pieces).where(its))
        return SharedReport(
            row.number, device, id, row.run, row.round, report, state, reason, payload
        ), reason


def settled(db: Database, fleet: str) -> list[SharedReport]:
    """Reports judged, or passed on, and not forgotten yet, in the order in which they were handed in."""
    wanted = select(letters).where(letters.c.fleet == fleet, letters.c.state != "open")
    with db.reading() as connection:
        rows: Any = connection.execute(wanted.order_by(letters.c.number)).all()
    return [
        SharedReport(
            row.number, row.device, row.id, row.run, row.round,
            msgspec.convert(row.report, Report), row.state, row.reason,
            bytes(row.payload) if row.payload is not None else None,
        )
        for row in rows
    ]  # fmt: skip


def forget(db: Database, number: int) -> None:
    """A report has arrived where it was to go."""
    with db.writing() as connection:
        connection.execute(delete(letters).where(letters.c.number == number))
