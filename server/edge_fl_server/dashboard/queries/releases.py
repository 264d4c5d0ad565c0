"""Releases with the devices that run them, and roll-outs with their progress."""

from __future__ import annotations

from msgspec import Struct
from sqlalchemy import case, func, select

from edge_fl_server.registry import Database, releases, rollouts
from edge_fl_server.registry.records import ReleaseRecord, RolloutRecord
from edge_fl_server.registry.tables import devices, reports

NEWEST = 50


class HeadReports(Struct, frozen=True):
    """The newest report of each head-only device on one release: number of devices, of failures, and accuracies.

    `after` is the mean of `measured` devices. `paired_before` and `paired_after` are the means of the `paired` devices that measured the
    model served before on the same images, too.
    """

    devices: int = 0
    failed: int | None = None
    measured: int = 0
    after: float | None = None
    paired: int = 0
    paired_before: float | None = None
    paired_after: float | None = None


class ReleaseRow(Struct, frozen=True):
    """One release and the number of devices that run it, also as a part of all head-only devices.

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
    newest = func.row_number().over(
        partition_by=(reports.c.release, reports.c.device),
        order_by=(reports.c.received_at.desc(), reports.c.id.desc()),
    )
    columns = (reports.c.release, reports.c.error, reports.c.before, reports.c.after, newest.label("place"))
    each = (
        select(*columns)
        .where(reports.c.fleet == fleet, reports.c.kind == "head", reports.c.release > 0)
        .subquery()
    )
    is_pair = each.c.before.is_not(None) & each.c.after.is_not(None)
    fits = select(
        each.c.release,
        func.count(),
        func.sum(case((each.c.error != "", 1), else_=0)),
        func.count(each.c.after),
        func.avg(each.c.after),
        func.count(case((is_pair, 1))),
        func.avg(case((is_pair, each.c.before))),
        func.avg(case((is_pair, each.c.after))),
    ).where(each.c.place == 1)
    with db.reading() as connection:
        running = {row[0]: row[1] for row in connection.execute(by_release.group_by(devices.c.release))}
        fitted = {row[0]: HeadReports(*row[1:]) for row in connection.execute(fits.group_by(each.c.release))}
        head_only = connection.execute(heads).scalar_one()
    current = next((record for record in recent if record.state not in rollouts.OVER), None)
    served = rollouts.served_release(db, fleet) or max(running, default=0)
    rows = {
        record.release: ReleaseRow(
            record,
            running.get(record.release, 0),
            min(running.get(record.release, 0) / max(head_only, 1), 1.0),
            fitted.get(record.release, HeadReports()),
            current is None and (kept is None or record.release in kept),
            record.release < served,
        )
        for record in releases.listed(db, fleet)[:NEWEST]
    }
    return ReleasesPage(rows, recent, current, head_only)
