"""The fleet as a table: a page of devices, sorted and searched by the database, with what each reported last.

Only the devices of the page are looked up in the reports, so that ten thousand of them cost about as much as fifty.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from sqlalchemy import ColumnElement, Select, and_, case, func, or_, select

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
REPORTED = ("before", "after")


class Wish(Struct, frozen=True):
    """What a person wants to see of the fleet; every field may come from an address bar."""

    search: str = ""
    status: str = ""
    tier: str = ""
    sort: str = "device"
    down: bool = False
    page: int = 0


class FleetRow(Struct, frozen=True):
    """One device. `before` and `after` are its newest accuracies; `head_at` is when it fitted its head; `drift` is 0 for none."""

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


class FleetPage(Struct, frozen=True):
    """The rows of one page, out of `found` that match the wish, out of `total`; and how many devices there are by status."""

    rows: tuple[FleetRow, ...]
    found: int
    total: int
    by_status: dict[str, int]
    page: int
    pages: int


def page(db: Database, fleet: str, wish: Wish, *, per_page: int = PER_PAGE) -> FleetPage:
    """One page of the fleet. Raises RunError when the registry does not answer."""
    matching = and_(devices.c.fleet == fleet, *_filters(wish))
    with db.reading() as connection:
        words = select(devices.c.status, func.count()).where(devices.c.fleet == fleet)
        by_status: dict[str, int] = dict(connection.execute(words.group_by(devices.c.status)).all())
        found = connection.execute(select(func.count()).select_from(devices).where(matching)).scalar_one()
        pages = max(1, -(-found // per_page))
        number = min(max(wish.page, 0), pages - 1)
        chosen = _sorted(wish, fleet).where(matching).limit(per_page).offset(number * per_page)
        rows = [row._asdict() for row in connection.execute(chosen)]
        names = [row["device"] for row in rows]
        newest = {row.device: row._asdict() for row in connection.execute(_newest(fleet, names))}
        today: dict[str, int] = dict(connection.execute(_today(fleet, names)).all())
    made = tuple(_row(row, newest.get(row["device"], {}), today.get(row["device"], 0)) for row in rows)
    return FleetPage(made, found, sum(by_status.values()), dict(sorted(by_status.items())), number, pages)


def _filters(wish: Wish) -> list[ColumnElement[bool]]:
    filters: list[ColumnElement[bool]] = []
    if wish.search:
        text = wish.search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        columns = (devices.c.device, devices.c.status, devices.c.activity, devices.c.why)
        filters.append(or_(*(column.ilike(f"%{text}%", escape="\\") for column in columns)))
    if wish.status:
        filters.append(devices.c.status == wish.status)
    if wish.tier:
        filters.append(_tier == wish.tier)
    return filters


def _sorted(wish: Wish, fleet: str) -> Select[Any]:
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
    if wish.sort in REPORTED:
        key: ColumnElement[Any] = func.coalesce(_last(fleet, wish.sort), -1.0)
    else:
        key = SORTS.get(wish.sort, devices.c.device)
    return wanted.order_by(key.desc() if wish.down else key.asc(), devices.c.device)


def _last(fleet: str, column: str) -> Any:
    """A column of a device's newest measured report: looked up by the primary key, once per device."""
    mine = and_(reports.c.fleet == fleet, reports.c.device == devices.c.device)
    measured = and_(reports.c.error == "", reports.c.after.is_not(None))
    newest = select(reports.c[column]).where(mine, measured).order_by(reports.c.received_at.desc()).limit(1)
    return newest.correlate(devices).scalar_subquery()


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


def _today(fleet: str, names: Sequence[str]) -> Select[Any]:
    midnight = datetime.now(UTC).strftime("%Y-%m-%dT00:00:00")
    total = func.sum(reports.c.bytes_down + reports.c.bytes_up)
    mine = and_(reports.c.fleet == fleet, reports.c.device.in_(names), reports.c.received_at >= midnight)
    return select(reports.c.device, total).where(mine).group_by(reports.c.device)


def _row(row: dict[str, Any], newest: dict[str, Any], today: int) -> FleetRow:
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
        bytes_today=int(today or 0),
        drift=able.get("drift", 0.0),
    )
