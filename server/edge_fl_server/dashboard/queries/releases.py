"""Releases with the devices that run them, and roll-outs with their progress."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import case, func, select

from edge_fl_server.dashboard.queries import standing
from edge_fl_server.registry import Database, releases, rollouts, servers
from edge_fl_server.registry.records import ReleaseRecord, RolloutRecord
from edge_fl_server.registry.servers import Presence
from edge_fl_server.registry.tables import devices, reports
from edge_fl_server.runs.statistics import Paired, of_differences

NEWEST = 50


class HeadReports(Struct, frozen=True):
    """The reports of head-only devices on one release: number of devices, of failures, and accuracies, from the newest of each device.

    `after` is the mean of `measured` devices. `paired_before` and `paired_after` are the means of the `paired` devices that measured the
    model served before on the same images, too, in the first such report: later ones compare with a head on the same release.
    """

    devices: int = 0
    failed: int | None = None
    measured: int = 0
    after: float | None = None
    paired: int = 0
    paired_before: float | None = None
    paired_after: float | None = None
    gain: Paired | None = None


class ReleaseRow(Struct, frozen=True):
    """One release and the number of devices that run it, also as a part of all head-only devices.

    `startable`: a roll-out of it may start; `served`: the fleet serves it; `older`: than the one that it serves; `replaces`: the release
    that its first roll-out replaced (0: none).
    """

    record: ReleaseRecord
    running: int
    part: float
    reports: HeadReports
    startable: bool
    served: bool
    older: bool
    replaces: int


class ReleasesPage(Struct, frozen=True):
    """Releases by number and roll-outs, the newest first, `agents` those of the agent's software; `heads` counts the head-only devices.

    `back` is the release that a roll-back of the whole fleet returns (0: none, or a roll-out is under way).
    """

    releases: dict[int, ReleaseRow]
    rollouts: tuple[RolloutRecord, ...]
    agents: tuple[RolloutRecord, ...]
    current: RolloutRecord | None
    heads: int
    served: int
    back: int
    server: Presence


def page(db: Database, fleet: str, kept: frozenset[int] | None = None) -> ReleasesPage:
    """The releases and roll-outs of a fleet; `kept` are the releases whose files exist, None if that is unknown."""
    recent = tuple(rollouts.listed(db, fleet)[:NEWEST])
    mine = devices.c.fleet == fleet
    mine &= standing.HEAD_ONLY
    by_release = select(devices.c.release, func.count()).where(mine, devices.c.release > 0)
    heads = select(func.count()).where(mine)
    with db.reading() as connection:
        running = {row[0]: row[1] for row in connection.execute(by_release.group_by(devices.c.release))}
        head_only = connection.execute(heads).scalar_one()
    fitted = head_reports(db, fleet)
    current = next((record for record in recent if record.state not in rollouts.OVER), None)
    served = rollouts.served_release(db, fleet) or max(running, default=0)
    replaces = {record.release: record.previous for record in recent if record.previous}
    back = 0 if current else rollouts.previous_release(db, fleet, served)
    rows = {
        record.release: ReleaseRow(
            record,
            running.get(record.release, 0),
            min(running.get(record.release, 0) / max(head_only, 1), 1.0),
            fitted.get(record.release, HeadReports()),
            startable=current is None
            and record.release != served
            and (kept is None or record.release in kept),
            served=record.release == served,
            older=record.release < served,
            replaces=replaces.get(record.release, 0),
        )
        for record in releases.listed(db, fleet)[:NEWEST]
    }
    if back not in rows or not rows[back].startable or back >= served:
        back = 0
    server = servers.presence(db, fleet)
    agents = tuple(rollouts.listed(db, fleet, "agent")[:NEWEST])
    return ReleasesPage(rows, recent, agents, current, head_only, served, back, server)


def head_reports(db: Database, fleet: str) -> dict[int, HeadReports]:
    """The reports of a fleet by release."""
    version = select(func.count(), func.max(reports.c.received_at)).where(reports.c.fleet == fleet)
    with db.reading() as connection:
        count, newest = connection.execute(version).one()
    return _head_reports(db, fleet, count, newest or "")


@lru_cache(maxsize=4)  # open pages ask every 1.5 s, and reports are only added
def _head_reports(db: Database, fleet: str, count: int, newest_at: str) -> dict[int, HeadReports]:
    report = reports.c
    key = (report.release, report.device)
    is_pair = report.before.is_not(None) & report.after.is_not(None)
    newest = func.row_number().over(partition_by=key, order_by=(report.received_at.desc(), report.id.desc()))
    first = func.row_number().over(
        partition_by=key, order_by=(case((is_pair, 0), else_=1), report.received_at, report.id)
    )
    columns = (report.release, report.error, report.before, report.after)
    mine = (report.fleet == fleet) & (report.kind == "head") & (report.release > 0)
    each = select(*columns, newest.label("newest"), first.label("first")).where(mine).subquery()
    current = each.c.newest == 1
    pair = (each.c.first == 1) & each.c.before.is_not(None) & each.c.after.is_not(None)
    gain = each.c.after - each.c.before
    sums = (
        func.count(case((current, 1))),
        func.sum(case((current & (each.c.error != ""), 1), else_=0)),
        func.count(case((current, each.c.after))),
        func.avg(case((current, each.c.after))),
        func.count(case((pair, 1))),
        func.avg(case((pair, each.c.before))),
        func.avg(case((pair, each.c.after))),
        func.avg(case((pair, gain))),
        func.avg(case((pair, gain * gain))),
    )
    with db.reading() as connection:
        rows = connection.execute(select(each.c.release, *sums).group_by(each.c.release)).all()
    return {row[0]: _summed(*row[1:]) for row in rows}


def _summed(*row: Any) -> HeadReports:
    found = HeadReports(*row[:-2])
    return replace(found, gain=of_differences(found.paired, row[-2] or 0.0, row[-1] or 0.0))
