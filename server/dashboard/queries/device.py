"""One device: what it is, what it was asked, what it reported, what of that was refused."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import select

from server.registry import Database
from server.registry.records import DeviceRecord, Rejection, ReportRecord, RequestRecord
from server.registry.tables import devices, rejections, reports, requests

NEWEST = 60


class DevicePage(Struct, frozen=True):
    """A device and its newest `NEWEST` tasks, reports and refusals, each the newest first."""

    record: DeviceRecord
    reports: tuple[ReportRecord, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    rejections: tuple[Rejection, ...] = ()


def page(db: Database, fleet: str, device: str) -> DevicePage | None:
    """What is known of a device; None for one that was never heard of."""
    found = db.find(_of(devices, fleet, device), DeviceRecord)
    if not found:
        return None
    return DevicePage(
        found[0],
        tuple(db.find(_of(reports, fleet, device, "received_at"), ReportRecord)),
        tuple(db.find(_of(requests, fleet, device, "requested_at"), RequestRecord)),
        tuple(db.find(_of(rejections, fleet, device, "number"), Rejection)),
    )


def _of(table: Any, fleet: str, device: str, order: str = "") -> Any:
    wanted = select(table).where(table.c.fleet == fleet, table.c.device == device)
    return wanted.order_by(table.c[order].desc()).limit(NEWEST) if order else wanted


def capability(record: DeviceRecord) -> dict[str, Any]:
    """What the device said that it is and can do, in the order in which it says so; empty before it has."""
    return msgspec.to_builtins(record.capability) if record.capability else {}
