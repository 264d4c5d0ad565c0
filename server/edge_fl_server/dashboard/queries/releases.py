"""Releases with the devices that run them, and roll-outs with their progress."""

from __future__ import annotations

from msgspec import Struct
from sqlalchemy import case, func, select

from edge_fl_server.registry import Database, releases, rollouts
from edge_fl_server.registry.records import ReleaseRecord, RolloutRecord
from edge_fl_server.registry.tables import devices, reports

NEWEST = 50


class HeadReports(Struct, frozen=True):
    """Reports of head-only devices on one release: number of devices, of failures, mean accuracy before and after the fit."""

    devices: int = 0
    failed: int | None = None
    before: float | None = None
    after: float | None = None


class ReleaseRow(Struct, frozen=True):
    """One release and the devices that run it: their number and part of all that run any.

    `startable`: a roll-out of it may start; `older`: than the release that the fleet serves.
    """

    record: ReleaseRecord
    running: int
    part: float
    reports: HeadReports
    startable: bool
    older: bool


class ReleasesPage(Struct, frozen=True):
    """Releases by number and roll-outs, the newest first; `heads` counts the head-only devices."""

    releases: dict[int, ReleaseRow]
    rollouts: tuple[RolloutRecord, ...]
    current: RolloutRecord | None
    heads: int


def page(db: Database, fleet: str, kept: frozenset[int] | None = None) -> ReleasesPage:
    """The releases and roll-outs of a fleet; `kept` are the releases whose files exist, None if that is unknown."""
    recent = tuple(rollouts.listed(db, fleet)[:NEWEST])
    mine = devices.c.fleet == fleet
    by_release = select(devices.c.release, func.count()).where(mine, devices.c.release > 0)
    heads = select(func.count()).where(mine, devices.c.capability["tier"].as_string() == "head")
    fits = select(
        reports.c.release,
        func.count(func.distinct(reports.c.device)),
        func.sum(case((reports.c.error != "", 1), else_=0)),
        func.avg(reports.c.before),
        func.avg(reports.c.after),
    ).where(reports.c.fleet == fleet, reports.c.kind == "head", reports.c.release > 0)
    with db.reading() as connection:
        running = {row[0]: row[1] for row in connection.execute(by_release.group_by(devices.c.release))}
        fitted = {
            row[0]: HeadReports(*row[1:]) for row in connection.execute(fits.group_by(reports.c.release))
        }
        head_only = connection.execute(heads).scalar_one()
    current = next((record for record in recent if record.state not in rollouts.OVER), None)
    served, total = (
        rollouts.served_release(db, fleet) or max(running, default=0),
        max(sum(running.values()), 1),
    )
    rows = {
        record.release: ReleaseRow(
            record,
            running.get(record.release, 0),
            running.get(record.release, 0) / total,
            fitted.get(record.release, HeadReports()),
            current is None and (kept is None or record.release in kept),
            record.release < served,
        )
        for record in releases.listed(db, fleet)[:NEWEST]
    }
    return ReleasesPage(rows, recent, current, head_only)
