"""Which devices are blocked, and which run a release: counts in SQL."""

from sqlalchemy import ColumnElement, case, func, select

from edge_fl.errors import InputError
from edge_fl.wire.messages import GONE
from edge_fl_console import failure_texts
from edge_fl_server.registry import Database, registered_devices
from edge_fl_server.registry.registered_devices import HEAD_ONLY, STANDING, of_fleet
from edge_fl_server.registry.tables import devices

BLOCKED = STANDING != ""
STATUS: ColumnElement[str] = case((devices.c.revoked, "revoked"), else_=devices.c.status)
"""The status of a device; a revoked one's connection says nothing about the device."""
ONLY: dict[str, ColumnElement[bool]] = {
    "blocked": BLOCKED,
    "quarantined": STANDING == "quarantined",
    "revoked": STANDING == "revoked",
}
"""Filters of the list of devices, next to those by what needs attention."""


def by_status(db: Database, fleet: str) -> dict[str, int]:
    """The number of devices by status, without removed ones."""
    query = select(STATUS, func.count()).where(of_fleet(fleet)).group_by(STATUS)
    return db.pairs(query.order_by(STATUS))


def counts(db: Database, fleet: str, groups: dict[str, ColumnElement[bool]]) -> dict[str, int]:
    """The number of devices in each group, in one pass."""
    sums = (func.coalesce(func.sum(case((which, 1), else_=0)), 0) for which in groups.values())
    (row,) = db.rows(select(*sums).where(of_fleet(fleet)))
    return dict(zip(groups, row, strict=True))


def on_release(db: Database, fleet: str, release: int) -> dict[str, int]:
    """The head-only devices that are "running" a release, and the "others"; "running_gone" and "others_gone" are not connected."""
    running, gone = devices.c.release == release, devices.c.status.in_(GONE)
    groups = {
        "running": HEAD_ONLY & running,
        "running_gone": HEAD_ONLY & running & gone,
        "others": HEAD_ONLY & ~running,
        "others_gone": HEAD_ONLY & ~running & gone,
    }
    return counts(db, fleet, groups)


def reason(db: Database, fleet: str, device: str) -> str:
    """Why a device is in quarantine, as a sentence. Raises InputError if it is not."""
    record = registered_devices.get(db, fleet, device)
    if record is None or not record.quarantine:
        raise InputError(f"{device}: not in quarantine")
    return f"It is in quarantine: {failure_texts.quarantined(record.quarantine)}."
