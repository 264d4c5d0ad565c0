"""The fleet as a table: a page of devices, sorted and searched by the database, with what each reported last.

Only the devices of the page are looked up in the reports, so that ten thousand of them cost about as much as fifty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from sqlalchemy import ColumnElement, Select, and_, case, func, or_, select

from edge_fl.metrics import EPSILON
from server.registry import Database
from server.registry.tables import devices, reports, runs

PER_PAGE = 50

_tier = devices.c.capability["tier"].as_string()
_head = devices.c.capability["head"].as_string()
_samples = devices.c.capability["samples"].as_integer()
_standing = case((devices.c.revoked, "revoked"), (devices.c.quarantine != "", "quarantined"), else_="")

SORTS: dict[str, ColumnElement[Any]] = {
    "device": devices.c.device,
    "status": devices.c.status,
    "tier": func.coalesce(_tier, ""),
    "release": devices.c.release,
    "head": func.coalesce(_head, ""),
    "samples": func.coalesce(_samples, 0),
    "seen": devices.c.seen_at,
    "drift": func.coalesce(devices.c.capability["drift"].as_float(), 0.0),
}
"""Columns that sort without a look at the reports."""


class FleetQuery(Struct, frozen=True):
    """What a person wants to see of the fleet; every field may come from an address bar."""

    search: str = ""
    status: str = ""
    tier: str = ""
    sort: str = "device"
    down: bool = False
    page: int = 0


class FleetRow(Struct, frozen=True):
    """One device. `before` and `after` are its newest accuracies; `head_at` is when it fitted its head; `drift` is 0 for none.

    `epsilon` is what its updates have told, None where it sends none with noise.
    """

    device: str
    status: str
    standing: str
    activity: str
    why: str
    tier: str
    release: int
    head: str
    samples: int
    samples_per_class: tuple[int, ...]
    seen_at: str
    method: str = ""
    head_at: str = ""
    before: float | None = None
    after: float | None = None
    bytes_today: int = 0
    drift: float = 0.0
    epsilon: float | None = None


class FleetPage(Struct, frozen=True):
    """The rows of one page, out of `found` that match the query, out of `total`; and how many devices there are by status."""

    rows: tuple[FleetRow, ...]
    found: int
    total: int
    by_status: dict[str, int]
    page: int
    pages: int


def page(db: Database, fleet: str, query: FleetQuery, *, per_page: int = PER_PAGE) -> FleetPage:
    """One page of the fleet. Raises RunError when the registry does not answer."""
    matching = and_(devices.c.fleet == fleet, *_filters(query))
    with db.reading() as connection:
        words = select(devices.c.status, func.count()).where(devices.c.fleet == fleet)
        by_status: dict[str, int] = dict(connection.execute(words.group_by(devices.c.status)).all())
        found = connection.execute(select(func.count()).select_from(devices).where(matching)).scalar_one()
        pages = max(1, -(-found // per_page))
        number = min(max(query.page, 0), pages - 1)
        chosen = _sorted(query, fleet).where(matching).limit(per_page).offset(number * per_page)
        rows = [row._asdict() for row in connection.execute(chosen)]
        names = [row["device"] for row in rows]
        newest = {row.device: row._asdict() for row in connection.execute(_newest(fleet, names))}
        of_page = and_(reports.c.fleet == fleet, reports.c.device.in_(names))
        sums = select(reports.c.device, _bytes_today(), _most_told()).where(of_page)
        summed = {row[0]: row[1:] for row in connection.execute(sums.group_by(reports.c.device))}
    made = tuple(
        _row(row, newest.get(row["device"], {}), *summed.get(row["device"], (0, None))) for row in rows
    )
    return FleetPage(made, found, sum(by_status.values()), dict(sorted(by_status.items())), number, pages)


def _filters(query: FleetQuery) -> list[ColumnElement[bool]]:
    filters: list[ColumnElement[bool]] = []
    if query.search:
        text = query.search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        columns = (devices.c.device, devices.c.status, devices.c.activity, devices.c.why)
        filters.append(or_(*(column.ilike(f"%{text}%", escape="\\") for column in columns)))
    if query.status:
        filters.append(devices.c.status == query.status)
    if query.tier:
        filters.append(_tier == query.tier)
    return filters


def _sorted(query: FleetQuery, fleet: str) -> Select[Any]:
    wanted = select(
        devices.c.device,
        devices.c.status,
        _standing.label("standing"),
        devices.c.activity,
        devices.c.why,
        devices.c.release,
        devices.c.seen_at,
        devices.c.capability,
    )
    if reported := REPORTED.get(query.sort):
        key = reported(and_(reports.c.fleet == fleet, reports.c.device == devices.c.device))
    else:
        key = SORTS.get(query.sort, devices.c.device)
    return wanted.order_by(key.desc() if query.down else key.asc(), devices.c.device)


def _last(mine: ColumnElement[bool], column: ColumnElement[Any]) -> ColumnElement[Any]:
    """A column of a device's newest measured report, or of its run: looked up once per device."""
    measured = and_(reports.c.error == "", reports.c.after.is_not(None))
    told = reports.outerjoin(runs, runs.c.run == reports.c.run)
    newest = select(column).select_from(told).where(mine, measured).order_by(reports.c.received_at.desc())
    return newest.limit(1).correlate(devices).scalar_subquery()


def _over_all(mine: ColumnElement[bool], column: ColumnElement[Any]) -> ColumnElement[Any]:
    """A sum over a device's reports."""
    return select(column).where(mine).correlate(devices).scalar_subquery()


def _head_at() -> ColumnElement[Any]:
    return case((reports.c.kind == "head", reports.c.received_at), else_="")


def _bytes_today() -> ColumnElement[Any]:
    midnight = datetime.now(UTC).strftime("%Y-%m-%dT00:00:00")
    bytes = case((reports.c.received_at >= midnight, reports.c.bytes_down + reports.c.bytes_up), else_=0)
    return func.coalesce(func.sum(bytes), 0)


def _most_told() -> ColumnElement[Any]:
    return func.max(reports.c.metrics[EPSILON].as_float())


REPORTED: dict[str, Callable[[ColumnElement[bool]], ColumnElement[Any]]] = {
    "before": lambda mine: func.coalesce(_last(mine, reports.c.before), -1.0),
    "after": lambda mine: func.coalesce(_last(mine, reports.c.after), -1.0),
    "method": lambda mine: func.coalesce(_last(mine, runs.c.method), ""),
    "head_at": lambda mine: func.coalesce(_last(mine, _head_at()), ""),
    "bytes_today": lambda mine: _over_all(mine, _bytes_today()),
    "epsilon": lambda mine: func.coalesce(_over_all(mine, _most_told()), -1.0),
}
"""Columns that sort by a device's own reports, all of which are looked at."""


def _newest(fleet: str, names: Sequence[str]) -> Select[Any]:
    """The newest measured report of each device."""
    place = func.row_number().over(partition_by=reports.c.device, order_by=reports.c.received_at.desc())
    measured = and_(reports.c.fleet == fleet, reports.c.error == "", reports.c.after.is_not(None))
    ranked = select(
        reports.c.device,
        reports.c.run,
        reports.c.kind,
        reports.c.head,
        reports.c.before,
        reports.c.after,
        reports.c.received_at,
        place.label("place"),
    ).where(measured, reports.c.device.in_(names))
    found = ranked.subquery()
    return select(found, runs.c.method).outerjoin(runs, runs.c.run == found.c.run).where(found.c.place == 1)


def _row(row: dict[str, Any], newest: dict[str, Any], today: int, epsilon: float | None) -> FleetRow:
    able = row.pop("capability") or {}
    return FleetRow(
        **row,
        tier=able.get("tier", ""),
        head=able.get("head", ""),
        samples=able.get("samples", 0),
        samples_per_class=tuple(able.get("samples_per_class", ())),
        method=newest.get("method") or "",
        head_at=newest.get("received_at", "") if newest.get("kind") == "head" else "",
        before=newest.get("before"),
        after=newest.get("after"),
        bytes_today=int(today),
        drift=able.get("drift", 0.0),
        epsilon=epsilon,
    )
