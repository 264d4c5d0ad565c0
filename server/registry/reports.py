"""Reports in the registry: those that count, each once, and those that were refused, each with its reason."""

from __future__ import annotations

import msgspec
from sqlalchemy import select, update

from edge_fl import metrics
from edge_fl.wire.messages import Report
from server.registry.database import Database, now
from server.registry.records import DeviceRecord, Rejection, ReportRecord
from server.registry.tables import devices, rejections, reports

KEPT_REJECTIONS = 200


def record_of(fleet: str, device: str, run: str, round: int, report: Report) -> ReportRecord:
    """A report as the registry keeps it."""
    found = report.metrics
    return ReportRecord(
        fleet,
        device,
        report.id,
        run,
        round,
        report.kind,
        report.samples,
        dict(found),
        found.get(metrics.PERSONAL_BEFORE),
        found.get(metrics.PERSONAL_AFTER),
        report.release,
        report.head,
        report.seconds,
        report.bytes_down,
        report.bytes_up,
        report.error,
    )


def report_of(record: ReportRecord) -> Report:
    """The report that a record was made of, as far as anybody asks for it again."""
    return Report(
        record.id,
        record.kind,  # type: ignore[arg-type]
        "none",
        record.samples,
        record.metrics,
        release=record.release,
        head=record.head,
        seconds=record.seconds,
        bytes_down=record.bytes_down,
        bytes_up=record.bytes_up,
        error=record.error,
    )


def accept(db: Database, record: ReportRecord) -> bool:
    """Notes that a report counts; False, and no change, when it has been counted before."""
    with db.writing() as connection:
        return db.add(connection, reports, {**msgspec.to_builtins(record), "received_at": now()})


def counted(db: Database, fleet: str, device: str, id: str) -> bool:
    """Whether a report has been counted."""
    mine = (reports.c.fleet == fleet) & (reports.c.device == device) & (reports.c.id == id)
    with db.reading() as connection:
        return connection.execute(select(reports.c.id).where(mine)).first() is not None


def of_run(db: Database, run: str, round: int | None = None) -> list[ReportRecord]:
    """The reports of a run (or of one of its rounds) that count, as they came."""
    wanted = select(reports).where(reports.c.run == run).order_by(reports.c.received_at, reports.c.device)
    return db.find(wanted if round is None else wanted.where(reports.c.round == round), ReportRecord)


def of_release(db: Database, fleet: str, release: int) -> list[ReportRecord]:
    """What heads reported on one release, as it came."""
    wanted = select(reports).where(reports.c.fleet == fleet, reports.c.release == release)
    return db.find(wanted.order_by(reports.c.received_at, reports.c.device), ReportRecord)


def reject(db: Database, rejection: Rejection, *, quarantine_after: int = 0) -> str:
    """Notes a report that does not count; with `quarantine_after`, a device that has so many is put in quarantine.

    Returns why it is in quarantine from now on; empty when nothing has changed for it. The newest KEPT_REJECTIONS of a device are kept.
    """
    row = {**msgspec.to_builtins(rejection), "received_at": now()}
    del row["number"]
    mine = (devices.c.fleet == rejection.fleet) & (devices.c.device == rejection.device)
    unknown = msgspec.to_builtins(DeviceRecord(rejection.fleet, rejection.device, first_seen_at=now()))
    with db.writing() as connection:
        connection.execute(rejections.insert(), row)
        ours = (rejections.c.fleet == rejection.fleet) & (rejections.c.device == rejection.device)
        newest = select(rejections.c.number).where(ours).order_by(rejections.c.number.desc())
        if oldest := connection.execute(newest.offset(KEPT_REJECTIONS).limit(1)).scalar():
            connection.execute(rejections.delete().where(ours, rejections.c.number <= oldest))
        if not quarantine_after:
            return ""
        db.add(connection, devices, unknown)
        connection.execute(update(devices).where(mine).values(refusals=devices.c.refusals + 1))
        now_found = connection.execute(select(devices.c.refusals, devices.c.quarantine).where(mine)).one()
        if now_found.refusals < quarantine_after or now_found.quarantine:
            return ""
        why = f"{now_found.refusals} reports refused, the last for {rejection.reason}"
        connection.execute(update(devices).where(mine).values(quarantine=why))
        return why


def rejections_of(
    db: Database, fleet: str, *, device: str = "", run: str = "", newest: int = 1000
) -> list[Rejection]:
    """Reports that were refused, the newest first."""
    wanted = select(rejections).where(rejections.c.fleet == fleet)
    wanted = wanted.where(rejections.c.device == device) if device else wanted
    wanted = wanted.where(rejections.c.run == run) if run else wanted
    return db.find(wanted.order_by(rejections.c.number.desc()).limit(newest), Rejection)
