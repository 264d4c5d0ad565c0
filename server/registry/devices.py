"""The devices of a fleet in the registry: what each said last, and whether what it sends counts."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import msgspec
from sqlalchemy import and_, bindparam, select, update

from edge_fl.wire.messages import GONE
from server.registry.database import Database, now
from server.registry.records import DeviceRecord
from server.registry.tables import devices

STANDING = ("first_seen_at", "quarantine", "revoked", "refusals")
"""Columns that hearing from a device does not change."""
SILENT = DeviceRecord("", "").status
EVER = range(2**63)


def heard(db: Database, found: Iterable[DeviceRecord]) -> None:
    """Notes what devices said about themselves; their standing stays as it is."""
    at = now()
    rows = [
        {**msgspec.to_builtins(record), "seen_at": at, "first_seen_at": record.first_seen_at or at}
        for record in found
    ]
    with db.writing() as connection:
        db.put(connection, devices, rows, *STANDING)


def silence(db: Database, fleet: str, heard: range = EVER, but: Container[str] = ()) -> None:
    """Nobody listens any more: devices that were there when they were heard last, as number `heard`, are "silent" from now on."""
    columns = select(devices.c.device, devices.c.seen_sequence)
    there = columns.where(devices.c.fleet == fleet, devices.c.status.not_in({*GONE, SILENT}))
    mine = and_(devices.c.fleet == fleet, devices.c.device == bindparam("name"))
    with db.writing() as connection:
        names = [
            row.device
            for row in connection.execute(there)
            if row.seen_sequence in heard and row.device not in but
        ]
        if names:
            change = update(devices).where(mine).values(status=SILENT, activity="idle")
            connection.execute(change, [{"name": name} for name in names])


def known(db: Database, fleet: str) -> list[DeviceRecord]:
    """Every device that was ever heard of, ascending."""
    return db.find(select(devices).where(devices.c.fleet == fleet).order_by(devices.c.device), DeviceRecord)


def get(db: Database, fleet: str, device: str) -> DeviceRecord | None:
    """One device."""
    wanted = select(devices).where(devices.c.fleet == fleet, devices.c.device == device)
    return next(iter(db.find(wanted, DeviceRecord)), None)


def barred(db: Database, fleet: str) -> dict[str, str]:
    """Devices whose reports do not count -> "quarantined" or "revoked"."""
    with db.reading() as connection:
        standing = (devices.c.quarantine != "") | devices.c.revoked
        rows = connection.execute(
            select(devices.c.device, devices.c.revoked).where(devices.c.fleet == fleet, standing)
        )
        return {row.device: "revoked" if row.revoked else "quarantined" for row in rows}


def quarantine(db: Database, fleet: str, device: str, why: str) -> None:
    """From now on nothing that the device sends counts."""
    _change(db, fleet, device, quarantine=why or "quarantined")


def let_in(db: Database, fleet: str, device: str) -> None:
    """Ends a quarantine; refusals are counted from 0 again."""
    _change(db, fleet, device, quarantine="", refusals=0)


def revoke(db: Database, fleet: str, device: str, *, revoked: bool = True) -> None:
    """The device's certificate is not valid any more; what its old session still sends does not count."""
    _change(db, fleet, device, revoked=revoked)


def _change(db: Database, fleet: str, device: str, **changes: Any) -> None:
    """Of a device that may never have been heard of."""
    row = {**msgspec.to_builtins(DeviceRecord(fleet, device)), "first_seen_at": now()}
    with db.writing() as connection:
        db.add(connection, devices, row)
        connection.execute(
            update(devices).where(devices.c.fleet == fleet, devices.c.device == device).values(**changes)
        )
