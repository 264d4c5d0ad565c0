"""Reports in the registry: accepted ones, each counted once, and rejected ones with their reasons."""

import msgspec
from sqlalchemy import ColumnElement, and_, func, select, update

from edge_fl import metrics
from edge_fl.untrusted import converted
from edge_fl.wire.messages import Report
from edge_fl_server.registry.database import Database, now
from edge_fl_server.registry.registered_devices import HEAD_ONLY
from edge_fl_server.registry.tables import (
    DeviceRecord,
    RejectionRecord,
    ReportRecord,
    devices,
    rejection_counts,
    rejections,
    reports,
)

KEPT_REJECTIONS = 200
"""Reasons of rejected messages that somebody else sent in a device's name."""
COUNTING = and_(devices.c.fleet == reports.c.fleet, devices.c.device == reports.c.device, HEAD_ONLY)
"""Joins the reports of the head-only devices whose reports count with these devices."""


def record_of(fleet: str, device: str, run: str, round: int, report: Report) -> ReportRecord:
    """Convert a report to its record, which has the report's fields of the same name. Work that failed has measured nothing."""
    measured = {} if report.error else report.metrics
    added = {
        "fleet": fleet,
        "device": device,
        "run": run,
        "round": round,
        "metrics": measured,
        "before": measured.get(metrics.PERSONAL_BEFORE),
        "after": measured.get(metrics.PERSONAL_AFTER),
    }
    return converted(msgspec.to_builtins(report) | added, ReportRecord)


def report_of(record: ReportRecord) -> Report:
    """Convert a record back to a report; boot, blob and extractor are not stored."""
    return converted(msgspec.to_builtins(record) | {"boot": "none"}, Report)


def accept(db: Database, record: ReportRecord) -> bool:
    """Store an accepted report; False, and no change, if it was stored before."""
    with db.writing() as connection:
        return db.insert_new(connection, reports, {**msgspec.to_builtins(record), "received_at": now()})


def is_accepted(db: Database, fleet: str, device: str, id: str) -> bool:
    """Whether a report was accepted before."""
    mine = (reports.c.fleet == fleet) & (reports.c.device == device) & (reports.c.id == id)
    return bool(db.rows(select(reports.c.id).where(mine)))


def of_run(db: Database, run: str, round: int | None = None) -> list[ReportRecord]:
    """The accepted reports of a run, or of one of its rounds, in order of arrival."""
    query = select(reports).where(reports.c.run == run).order_by(reports.c.received_at, reports.c.device)
    return db.find(query if round is None else query.where(reports.c.round == round), ReportRecord)


def newest_measured(db: Database, fleet: str) -> dict[str, ReportRecord]:
    """The newest report of each device with an accuracy, of those that measured one."""
    return _newest(db, fleet, reports.c.after.is_not(None))


def newest_heads(db: Database, fleet: str) -> dict[str, ReportRecord]:
    """The newest report of each device on a head that it fitted."""
    return _newest(db, fleet, reports.c.kind == "head")


def _newest(db: Database, fleet: str, such: ColumnElement[bool]) -> dict[str, ReportRecord]:
    row = reports.c
    mine = (row.fleet == fleet) & (row.error == "") & such
    newest = func.row_number().over(partition_by=row.device, order_by=row.received_at.desc())
    places = select(row.fleet, row.device, row.id, newest.label("newest")).where(mine).subquery()
    same = (row.fleet == places.c.fleet) & (row.device == places.c.device) & (row.id == places.c.id)
    found = db.find(select(reports).join(places, same).where(places.c.newest == 1), ReportRecord)
    return {report.device: report for report in found}


def accuracies_on(db: Database, fleet: str, release: int) -> dict[str, float]:
    """The newest accuracy on a release of each head-only device whose reports count."""
    row = reports.c
    measured = (row.release == release) & row.after.is_not(None)
    query = select(row.device, row.after).join_from(reports, devices, COUNTING).where(_heads(fleet), measured)
    return db.pairs(query.order_by(row.received_at))


def first_pairs_on(db: Database, fleet: str, release: int) -> dict[str, tuple[float, float]]:
    """Accuracies on the same images before and after the first fit on a release, of each head-only device whose reports count.

    Later reports compare with a head on the same release, or with a release from which the device came back: they are no pair.
    """
    row = reports.c
    query = select(row.device, row.before, row.after).join_from(reports, devices, COUNTING)
    mine = query.where(_heads(fleet), row.release == release)
    rows = db.rows(mine.order_by(row.received_at.desc(), row.id.desc()))
    first = {device: (before, after) for device, before, after in rows}
    return {
        device: (before, after)
        for device, (before, after) in first.items()
        if before is not None and after is not None
    }


def _heads(fleet: str) -> ColumnElement[bool]:
    return and_(reports.c.fleet == fleet, reports.c.kind == "head", reports.c.error == "")


def traffic(db: Database, fleet: str, since: str = "") -> dict[str, tuple[int, int, int]]:
    """By device: the number of its accepted reports since a time (ISO, UTC), the bytes sent with them and received for them."""
    row = reports.c
    sums = (func.count(), func.sum(row.bytes_up), func.sum(row.bytes_down))
    query = select(row.device, *sums).where(row.fleet == fleet, row.received_at >= since).group_by(row.device)
    return {device: (count, int(up or 0), int(down or 0)) for device, count, up, down in db.rows(query)}


def of_release(db: Database, fleet: str, release: int) -> list[ReportRecord]:
    """The accepted reports on one release, in order of arrival."""
    query = select(reports).where(reports.c.fleet == fleet, reports.c.release == release)
    return db.find(query.order_by(reports.c.received_at, reports.c.device), ReportRecord)


def reject(db: Database, rejection: RejectionRecord, *, count: int = 1, quarantine_after: int = 0) -> str:
    """Store a rejected report, for `count` of the same reason; quarantine the device after `quarantine_after` (0: never).

    Returns the reason of a new quarantine, otherwise "". The newest KEPT_REJECTIONS of a device are kept.
    """
    row = {**msgspec.to_builtins(rejection), "received_at": now()}
    del row["number"]
    mine = (devices.c.fleet == rejection.fleet) & (devices.c.device == rejection.device)
    unknown = msgspec.to_builtins(DeviceRecord(rejection.fleet, rejection.device, first_seen_at=now()))
    with db.writing() as connection:
        connection.execute(rejections.insert(), row)
        counted = {"fleet": rejection.fleet, "reason": rejection.reason}
        db.insert_new(connection, rejection_counts, {**counted, "count": 0})
        connection.execute(
            update(rejection_counts).filter_by(**counted).values(count=rejection_counts.c.count + count)
        )
        ours = (rejections.c.fleet == rejection.fleet) & (rejections.c.device == rejection.device)
        newest = select(rejections.c.number).where(ours).order_by(rejections.c.number.desc())
        if oldest := connection.execute(newest.offset(KEPT_REJECTIONS).limit(1)).scalar():
            connection.execute(rejections.delete().where(ours, rejections.c.number <= oldest))
        if not quarantine_after:
            return ""
        db.insert_new(connection, devices, unknown)
        connection.execute(update(devices).where(mine).values(rejections=devices.c.rejections + 1))
        device = connection.execute(select(devices.c.rejections, devices.c.quarantine).where(mine)).one()
        if device.rejections < quarantine_after or device.quarantine:
            return ""
        why = f"{device.rejections} reports rejected, the last one because of {rejection.reason}"
        why += f" ({rejection.detail})" if rejection.detail else ""
        connection.execute(update(devices).where(mine).values(quarantine=why, blocked_at=now()))
        return why


def rejected_devices(db: Database, fleet: str, reason: str, since: str) -> list[str]:
    """The devices with a message rejected for this reason since a time (ISO, UTC), ascending; without those that were revoked since."""
    row = rejections.c
    revoked = select(devices.c.device).where(devices.c.fleet == fleet, devices.c.revoked)
    such = (row.fleet == fleet) & (row.reason == reason) & (row.received_at >= since)
    query = select(row.device).distinct().where(such, row.device.not_in(revoked))
    return sorted(row.device for row in db.rows(query))
