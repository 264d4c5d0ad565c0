"""One device: its description, and its newest requests, reports and rejected reports."""

from typing import Any

from msgspec import Struct
from sqlalchemy import func, select

from edge_fl_console.dashboard.queries.releases import HeadReports, head_reports
from edge_fl_server.mqtt.devices import remote_settings
from edge_fl_server.mqtt.devices.remote_settings import SettingRow
from edge_fl_server.registry import Database
from edge_fl_server.registry.devices import desired_settings, of_fleet
from edge_fl_server.registry.tables import (
    DeviceRecord,
    RejectionRecord,
    ReportRecord,
    RequestRecord,
    devices,
    rejections,
    reports,
    requests,
)

NEWEST = 60


class DevicePage(Struct, frozen=True):
    """A device and up to `NEWEST` reports, requests and rejected reports, each the newest first; `fleet` are all reports on its release.

    `median_samples` is that of the fleet's devices with data (0: none). `settings`: those that were set, or are not at their defaults.
    """

    record: DeviceRecord
    reports: tuple[ReportRecord, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    rejections: tuple[RejectionRecord, ...] = ()
    fleet: HeadReports = HeadReports()
    median_samples: int = 0
    settings: tuple[SettingRow, ...] = ()

    @property
    def able(self) -> dict[str, Any]:
        """The capability of the device; empty if it has sent none."""
        return self.record.capability or {}

    @property
    def measured(self) -> ReportRecord | None:
        """The newest report with an accuracy."""
        return next((report for report in self.reports if report.after is not None), None)


def page(db: Database, fleet: str, device: str) -> DevicePage | None:
    """A device of the fleet; None if it never connected."""
    records = db.find(_of(devices, fleet, device), DeviceRecord)
    if not records:
        return None
    desired = desired_settings(db, fleet, device=device).get(device, remote_settings.NO_SETTINGS)
    return DevicePage(
        records[0],
        tuple(db.find(_of(reports, fleet, device, "received_at"), ReportRecord)),
        tuple(db.find(_of(requests, fleet, device, "requested_at"), RequestRecord)),
        tuple(db.find(_of(rejections, fleet, device, "number"), RejectionRecord)),
        head_reports(db, fleet).get(records[0].release, HeadReports()),
        _median_samples(db, fleet),
        tuple(remote_settings.rows(desired, records[0].capability)),
    )


def _median_samples(db: Database, fleet: str) -> int:
    """The lower median of the samples of a fleet's devices."""
    samples = devices.c.capability["samples"].as_integer()
    mine = of_fleet(fleet) & (samples > 0)
    with db.reading() as connection:
        count = connection.execute(select(func.count()).select_from(devices).where(mine)).scalar_one()
        middle = select(samples).where(mine).order_by(samples).limit(1).offset(max(count - 1, 0) // 2)
        return int(connection.execute(middle).scalar() or 0)


def _of(table: Any, fleet: str, device: str, order: str = "") -> Any:
    query = select(table).where(table.c.fleet == fleet, table.c.device == device)
    return query.order_by(table.c[order].desc()).limit(NEWEST) if order else query
