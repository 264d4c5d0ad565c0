"""Round requests and reports shared by several server processes during a round.

One process, the coordinator, runs the rounds; any number of workers receive, validate and acknowledge reports. A report and its chunks may
reach different workers and are put together here. The worker that adds the last chunk validates the report inside one transaction, so
that the crash of a worker leaves no partial state: the device sends again what was not acknowledged.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from sqlalchemy import delete, select, update

from edge_fl.wire.messages import Report
from edge_fl_server.registry.database import Database, value
from edge_fl_server.registry.tables import report_chunks, round_requests, shared_reports

RELEASE_PREFIX = "rel-"  # of the ids of reports on a release, which belong to no round request
MAX_CHUNKS = 8192  # per report; more are dropped
ReportState = Literal["open", "accepted", "rejected", "passed"]
Validate = Callable[[Report, Mapping[int, bytes]], tuple[ReportState, str] | None]
"""(report, chunks) -> (state, reason); None while chunks are missing."""


class SharedReport(Struct, frozen=True):
    """A received report, with its whole blob once it is validated. State "passed": the coordinator validates it."""

    number: int
    device: str
    id: str
    run: str
    round: int
    report: Report
    state: ReportState = "open"
    reason: str = ""
    payload: bytes | None = None


def open_request(db: Database, fleet: str, id: str, content: Mapping[str, Any]) -> None:
    """Accept reports on a round request from now on; `content` is what a worker needs to validate them."""
    db.put(round_requests, [{"fleet": fleet, "id": id, "content": content}])


def close_request(db: Database, fleet: str, id: str) -> None:
    """Close a round request and delete its reports; later ones are stale."""
    with db.writing() as connection:
        for table in (round_requests, report_chunks, shared_reports):
            connection.execute(delete(table).where(table.c.fleet == fleet, table.c.id == id))


def clear(db: Database, fleet: str) -> None:
    """Delete the round requests of an earlier coordinator, and the reports on them."""
    with db.writing() as connection:
        for table in (report_chunks, shared_reports):
            of_rounds = ~table.c.id.startswith(RELEASE_PREFIX)
            connection.execute(delete(table).where(table.c.fleet == fleet, of_rounds))
        connection.execute(delete(round_requests).where(round_requests.c.fleet == fleet))


def get_request(db: Database, fleet: str, id: str) -> dict[str, Any] | None:
    """The content of the open round request `id`."""
    query = select(round_requests.c.content).where(round_requests.c.fleet == fleet, round_requests.c.id == id)
    return next((row.content for row in db.rows(query)), None)


def add_report(db: Database, fleet: str, device: str, run: str, round: int, report: Report) -> None:
    """Store a received report; a second one with the same id changes nothing."""
    row = msgspec.to_builtins(SharedReport(0, device, report.id, run, round, report)) | {"fleet": fleet}
    del row["number"]
    with db.writing() as connection:
        db.insert_new(connection, shared_reports, row)


def add_chunk(db: Database, fleet: str, device: str, id: str, index: int, payload: bytes) -> None:
    """Store one received chunk."""
    if index < MAX_CHUNKS:
        row = {"fleet": fleet, "device": device, "id": id, "index": index, "payload": payload}
        with db.writing() as connection:
            db.insert_new(connection, report_chunks, row)


def validate_report(
    db: Database, fleet: str, device: str, id: str, validate: Validate
) -> SharedReport | None:
    """Validate a complete open report and store the result; None if it is incomplete or already validated.

    The row is locked: of two workers at once, the second finds the report validated.
    """
    reports, chunks = shared_reports.c, report_chunks.c
    this_report = (reports.fleet == fleet) & (reports.device == device) & (reports.id == id)
    its_chunks = (chunks.fleet == fleet) & (chunks.device == device) & (chunks.id == id)
    with db.writing() as connection:
        found = connection.execute(
            select(shared_reports).where(this_report, reports.state == "open").with_for_update()
        ).mappings()
        if (row := found.first()) is None:
            return None
        shared = value(row, SharedReport)
        rows = connection.execute(select(chunks.index, chunks.payload).where(its_chunks)).all()
        payloads = {int(index): bytes(payload) for index, payload in rows}
        if (result := validate(shared.report, payloads)) is None:
            return None
        state, reason = result
        payload = b"".join(payloads[index] for index in sorted(payloads)) if state != "rejected" else None
        changes = {"state": state, "reason": reason, "payload": payload}
        connection.execute(update(shared_reports).where(this_report).values(**changes))
        connection.execute(delete(report_chunks).where(its_chunks))
        return msgspec.structs.replace(shared, **changes)


def validated(db: Database, fleet: str) -> list[SharedReport]:
    """Validated (or passed) reports that were not removed yet, in order of arrival."""
    query = select(shared_reports).where(shared_reports.c.fleet == fleet, shared_reports.c.state != "open")
    return db.find(query.order_by(shared_reports.c.number), SharedReport)


def remove(db: Database, number: int) -> None:
    """Delete a report that the coordinator has taken."""
    db.change(delete(shared_reports).where(shared_reports.c.number == number))
