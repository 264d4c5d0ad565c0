"""Accuracies by release. A mean holds only devices that serve the release now, so that it has the same n everywhere."""

from functools import lru_cache

from msgspec import Struct
from sqlalchemy import and_, case, func, select

from edge_fl.metrics import FLEET
from edge_fl_server.registry import Database, registered_reports, rollouts
from edge_fl_server.registry.registered_devices import HEAD_ONLY, STANDING
from edge_fl_server.registry.tables import devices, reports
from edge_fl_server.runs.summaries import Paired, of_differences, paired


class HeadReports(Struct, frozen=True):
    """The reports on one release of the head-only devices whose reports count, from the newest of each device; `failed` could not fit.

    `after` is the mean accuracy of the `measured` devices that serve this release now, `fleet` that of the fleet's head on the same samples
    of those `fleet_measured` that have one. `gain` is of all devices that measured the model served before on the same samples, too, in
    their first report: later ones compare with a head on the same release, or with a release from which the device came back.
    """

    failed: int | None = None
    measured: int = 0
    after: float | None = None
    fleet_measured: int = 0
    fleet: float | None = None
    gain: Paired | None = None


class Change(Struct, frozen=True):
    """The accuracy of the same devices on the release in service compared with that on another one.

    The other one is the release before or, after a roll-back, the one that the fleet left (`rolled_back`; 0: unknown).
    """

    release: int
    other: int = 0
    rolled_back: bool = False
    found: Paired | None = None


def change(db: Database, fleet: str, served: int) -> Change:
    """The change of accuracy by the release in service."""
    if left := rollouts.left_release(db, fleet, served):
        old, new = (
            _newest_accuracies(db, fleet, release, *_version(db, fleet)) for release in (left, served)
        )
        return Change(served, left, True, paired(old, new))
    found = head_reports(db, fleet).get(served, HeadReports())
    first = (record.previous for record in reversed(rollouts.listed(db, fleet)) if record.release == served)
    other = next((release for release in first if release), 0)
    return Change(served, other, False, found.gain)


def head_reports(db: Database, fleet: str) -> dict[int, HeadReports]:
    """The reports of a fleet by release."""
    return _head_reports(db, fleet, *_version(db, fleet))


def full_devices(db: Database, fleet: str) -> tuple[float | None, int]:
    """The mean accuracy of the newest personal models of the full devices whose reports count, and their number."""
    return _full_devices(db, fleet, *_version(db, fleet))


def _version(db: Database, fleet: str) -> tuple[int, str, int]:
    """Changes with every report, and with the release of any device: open pages ask every 1.5 s."""
    version = select(func.count(), func.max(reports.c.received_at)).where(reports.c.fleet == fleet)
    ((count, newest),) = db.rows(version)
    serving = db.rows(select(devices.c.device, devices.c.release).where(devices.c.fleet == fleet, HEAD_ONLY))
    return count, newest or "", hash(frozenset(map(tuple, serving)))


@lru_cache(maxsize=8)
def _newest_accuracies(
    db: Database, fleet: str, release: int, count: int, newest_at: str, serving: int
) -> dict[str, float]:
    return registered_reports.accuracies_on(db, fleet, release)


@lru_cache(maxsize=4)
def _full_devices(
    db: Database, fleet: str, count: int, newest_at: str, serving: int
) -> tuple[float | None, int]:
    report, personal = reports.c, func.coalesce(reports.c.after, reports.c.before)
    newest = func.row_number().over(partition_by=report.device, order_by=report.received_at.desc())
    full = (devices.c.capability["tier"].as_string() == "full") & (STANDING == "")
    counts = and_(devices.c.fleet == report.fleet, devices.c.device == report.device, full)
    mine = (report.fleet == fleet) & (report.error == "") & personal.is_not(None)
    columns = (personal.label("personal"), newest.label("newest"))
    each = select(*columns).join_from(reports, devices, counts).where(mine).subquery()
    means = select(func.avg(each.c.personal), func.count()).where(each.c.newest == 1)
    ((mean, n),) = db.rows(means)
    return mean, n


@lru_cache(maxsize=4)
def _head_reports(
    db: Database, fleet: str, count: int, newest_at: str, serving: int
) -> dict[int, HeadReports]:
    report = reports.c
    key = (report.release, report.device)
    newest = func.row_number().over(partition_by=key, order_by=(report.received_at.desc(), report.id.desc()))
    first = func.row_number().over(
        partition_by=key, order_by=(case((report.error == "", 0), else_=1), report.received_at, report.id)
    )
    columns = (report.release, report.error, report.before, report.after)
    of_fleet = report.metrics[FLEET].as_float().label("of_fleet")
    serves = (devices.c.release == report.release).label("serves")
    mine = (report.fleet == fleet) & (report.kind == "head") & (report.release > 0)
    each = (
        select(*columns, of_fleet, serves, newest.label("newest"), first.label("first"))
        .join_from(reports, devices, registered_reports.COUNTING)
        .where(mine)
        .subquery()
    )
    current = each.c.newest == 1
    serving_now = current & each.c.serves
    pair = (each.c.first == 1) & each.c.before.is_not(None) & each.c.after.is_not(None)
    gain = each.c.after - each.c.before
    compared = serving_now & each.c.after.is_not(None)
    sums = (
        func.sum(case((current & (each.c.error != ""), 1), else_=0)),
        func.count(case((serving_now, each.c.after))),
        func.avg(case((serving_now, each.c.after))),
        func.count(case((compared, each.c.of_fleet))),
        func.avg(case((compared, each.c.of_fleet))),
        func.count(case((pair, 1))),
        *(func.avg(case((pair, value))) for value in (gain, gain * gain, each.c.before, each.c.after)),
    )
    rows = db.rows(select(each.c.release, *sums).group_by(each.c.release))
    return {
        release: HeadReports(failed, measured, after, fleet_measured, fleets_head, of_differences(*compared))
        for release, failed, measured, after, fleet_measured, fleets_head, *compared in rows
    }
