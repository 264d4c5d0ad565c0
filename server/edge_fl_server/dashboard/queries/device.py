"""One device: its description, and its newest requests, reports and rejected reports."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from sqlalchemy import select

from edge_fl_server.dashboard.queries.releases import HeadReports, head_reports
from edge_fl_server.registry import Database
from edge_fl_server.registry.records import DeviceRecord, Rejection, ReportRecord, RequestRecord
from edge_fl_server.registry.tables import devices, rejections, reports, requests

NEWEST = 60


class DevicePage(Struct, frozen=True):
    """A device and up to `NEWEST` reports, requests and rejected reports, each the newest first; `fleet` are all reports on its release."""

    record: DeviceRecord
    reports: tuple[ReportRecord, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    fleet: HeadReports = HeadReports()


def page(db: Database, fleet: str, device: str) -> DevicePage | None:
    """A device of the fleet; None if it never connected."""
    records = db.find(_of(devices, fleet, device), DeviceRecord)
    if not records:
        return None
    return DevicePage(
        records[0],
        tuple(db.find(_of(reports, fleet, device, "received_at"), ReportRecord)),
        tuple(db.find(_of(requests, fleet, device, "requested_at"), RequestRecord)),
        tuple(db.find(_of(rejections, fleet, device, "number"), Rejection)),
        head_reports(db, fleet).get(records[0].release, HeadReports()),
    )


def _of(table: Any, fleet: str, device: str, order: str = "") -> Any:
    query = select(table).where(table.c.fleet == fleet, table.c.device == device)
    return query.order_by(table.c[order].desc()).limit(NEWEST) if order else query
