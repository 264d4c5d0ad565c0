"""Releases with the devices that run them, and roll-outs with their progress."""

from functools import lru_cache
from statistics import fmean
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import case, func, select

from edge_fl_console.dashboard.queries import standing
from edge_fl_server.registry import Database, audit, fleets, rollouts
from edge_fl_server.registry import reports as registered_reports
from edge_fl_server.registry.devices import of_fleet
from edge_fl_server.registry.fleets import Presence
from edge_fl_server.registry.tables import ReleaseRecord, RolloutRecord, devices, reports
from edge_fl_server.runs.summaries import Paired, of_differences, paired

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


class Change(Struct, frozen=True):
    """Mean accuracies of the same devices on the release in service and on another one, `found` the difference.

    The other one is the release before or, after a roll-back, the one that the fleet left (`rolled_back`; 0: unknown).
    """

    release: int
    other: int = 0
    rolled_back: bool = False
    before: float | None = None
    after: float | None = None
    found: Paired | None = None


class ReleaseRow(Struct, frozen=True):
    """One release and the number of devices that run it, also as a part of all head-only devices.

    `startable`: a roll-out of it may start; `served`: the fleet serves it; `older`: than the one that it serves; `replaces`: the release
    that its first roll-out replaced (0: none); `rolled_back`: a roll-back left it, and it was not rolled out again.
    """

    record: ReleaseRecord
    running: int
    part: float
    reports: HeadReports
    startable: bool
    served: bool
    older: bool
    replaces: int
    rolled_back: bool = False


class RolloutRow(Struct, frozen=True):
    """A roll-out and who asked for it ("": no person, or unknown)."""

    record: RolloutRecord
    asked_by: str = ""


class ReleasesPage(Struct, frozen=True):
    """Releases by number and roll-outs, the newest first, `agents` those of the agent's software; `heads` counts the head-only devices.

    `back` is the release that a roll-back of the whole fleet returns (0: none, or a roll-out is under way). `change` is that by the
    release in service.
    """

    releases: dict[int, ReleaseRow]
    rollouts: tuple[RolloutRow, ...]
    agents: tuple[RolloutRow, ...]
    current: RolloutRecord | None
    heads: int
    served: int
    back: int
    server: Presence
    change: Change


def page(db: Database, fleet: str, kept: frozenset[int] | None = None) -> ReleasesPage:
    """The releases and roll-outs of a fleet; `kept` are the releases whose files exist, None if that is unknown.

    Then only a server that is online, which has them, can roll one out.
    """
    recent = tuple(rollouts.listed(db, fleet)[:NEWEST])
    mine = of_fleet(fleet) & standing.HEAD_ONLY
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
    server, left = fleets.presence(db, fleet), rollouts.rolled_back(recent)
    usable = current is None and (kept is not None or server.online)
    rows = {
        record.release: ReleaseRow(
            record,
            running.get(record.release, 0),
            min(running.get(record.release, 0) / max(head_only, 1), 1.0),
            fitted.get(record.release, HeadReports()),
            startable=usable and record.release != served and (kept is None or record.release in kept),
            served=record.release == served,
            older=record.release < served,
            replaces=replaces.get(record.release, 0),
            rolled_back=record.release in left,
        )
        for record in rollouts.releases_of(db, fleet)[:NEWEST]
    }
    if back not in rows or not rows[back].startable or back >= served:
        back = 0
    askers = audit.askers(db, fleet)
    shown = tuple(RolloutRow(record, askers.get(record.number, "")) for record in recent)
    agents = tuple(RolloutRow(record) for record in rollouts.listed(db, fleet, "agent")[:NEWEST])
    by_service = change(db, fleet, served)
    return ReleasesPage(rows, shown, agents, current, head_only, served, back, server, by_service)


def change(db: Database, fleet: str, served: int) -> Change:
    """The change of accuracy by the release in service."""
    if left := rollouts.left_release(db, fleet, served):
        old, new = (
            _newest_accuracies(db, fleet, release, *_version(db, fleet)) for release in (left, served)
        )
        both = old.keys() & new.keys()
        before, after = (fmean(values[device] for device in both) if both else None for values in (old, new))
        return Change(served, left, True, before, after, paired(old, new))
    found = head_reports(db, fleet).get(served, HeadReports())
    first = (record.previous for record in reversed(rollouts.listed(db, fleet)) if record.release == served)
    other = next((release for release in first if release), 0)
    return Change(served, other, False, found.paired_before, found.paired_after, found.gain)


def head_reports(db: Database, fleet: str) -> dict[int, HeadReports]:
    """The reports of a fleet by release."""
    return _head_reports(db, fleet, *_version(db, fleet))


def _version(db: Database, fleet: str) -> tuple[int, str]:
    """Changes with every report: open pages ask every 1.5 s, and reports are only added."""
    version = select(func.count(), func.max(reports.c.received_at)).where(reports.c.fleet == fleet)
    ((count, newest),) = db.rows(version)
    return count, newest or ""


@lru_cache(maxsize=8)
def _newest_accuracies(
    db: Database, fleet: str, release: int, count: int, newest_at: str
) -> dict[str, float]:
    return registered_reports.accuracies_on(db, fleet, release)


@lru_cache(maxsize=4)
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
    rows = db.rows(select(each.c.release, *sums).group_by(each.c.release))
    return {row[0]: _summed(*row[1:]) for row in rows}


def _summed(*row: Any) -> HeadReports:
    found = HeadReports(*row[:-2])
    return replace(found, gain=of_differences(found.paired, row[-2] or 0.0, row[-1] or 0.0))
