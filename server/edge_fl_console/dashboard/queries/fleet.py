"""One page of the fleet's devices with their newest reports; the database searches, sorts and pages.

Reports are read for the devices of the page only, unless it is sorted by one of their columns, so that 10,000 devices cost about as much
as 50.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct
from sqlalchemy import BindParameter, ColumnElement, and_, bindparam, case, func, or_, select

from edge_fl.metrics import EPSILON
from edge_fl_console.dashboard.queries import standing
from edge_fl_server import selectors
from edge_fl_server.registry import Database
from edge_fl_server.registry.devices import STANDING, of_fleet
from edge_fl_server.registry.tables import devices, reports
from edge_fl_server.selectors import SelectorError

PER_PAGE = 50
MAX_PAGE = 10**8


class FleetQuery(Struct, frozen=True):
    """Search, selector (`where`), filters, order and page; every field may come from the address bar.

    Without `sort` what needs attention comes first.
    """

    search: str = ""
    only: str = ""
    status: str = ""
    tier: str = ""
    sort: str = ""
    down: bool = False
    page: Annotated[int, Meta(ge=0, le=MAX_PAGE)] = 0
    where: str = ""


class FleetRow(Struct, frozen=True):
    """One device. `before` and `after` are its newest accuracies, `head_at` the time of its last fit, `drift` 0 for none.

    `epsilon` is the privacy budget it has spent, None if it sends no updates with noise. `standing` is "quarantined", "revoked" or "",
    `outlier_score` 1 and above for an outlier, `attention` how urgently it needs attention, 0 if it does not.
    """

    device: str
    status: str
    standing: str
    quarantine: str
    activity: str
    why: str
    tier: str
    release: int
    head: str
    samples: int
    seen_at: str
    head_at: str
    before: float | None
    after: float | None
    drift: float
    epsilon: float | None
    outlier_score: float
    attention: int


class FleetPage(Struct, frozen=True):
    """The rows of one page out of `matches` in a fleet of `total` devices; `by_status` and `by_only` count all of them.

    `wrong` is why the selector cannot be used; no device matches then.
    """

    rows: tuple[FleetRow, ...]
    matches: int
    total: int
    by_status: dict[str, int]
    by_only: dict[str, int]
    page: int
    pages: int
    wrong: str = ""


def page(db: Database, fleet: str, query: FleetQuery, *, per_page: int = PER_PAGE) -> FleetPage:
    """One page of the fleet. Raises RunError when the registry does not respond."""
    columns = _columns(fleet)
    matching, wrong = and_(of_fleet(fleet), *_filters(query)), ""
    if query.where:
        try:
            names = selectors.selected(db, fleet, query.where)
        except SelectorError as error:
            names, wrong = [], error.message
        # Literal values: a large fleet has more devices than a statement may have parameters.
        chosen: BindParameter[Any] = bindparam("chosen", names, expanding=True, literal_execute=True)
        matching = and_(matching, devices.c.device.in_(chosen))
    by_status = standing.by_status(db, fleet)
    with db.reading() as connection:
        matches = connection.execute(select(func.count()).where(matching)).scalar_one()
        pages = max(1, -(-matches // per_page))
        number = min(max(query.page, 0), pages - 1)
        order = _order(columns, query)
        listed = select(devices.c.device).where(matching).order_by(*order)
        names = list(connection.execute(listed.limit(per_page).offset(number * per_page)).scalars())
    shown = select(*(column.label(name) for name, column in columns.items()))
    rows = {
        row.device: row
        for row in db.find(shown.where(of_fleet(fleet), devices.c.device.in_(names)), FleetRow)
    }
    return FleetPage(
        tuple(rows[name] for name in names if name in rows),
        matches,
        sum(by_status.values()),
        by_status,
        standing.counts(db, fleet, standing.ONLY),
        number,
        pages,
        wrong,
    )


def _columns(fleet: str) -> dict[str, ColumnElement[Any]]:
    """The fields of a `FleetRow`; those from reports are subqueries, evaluated for each device."""
    able = devices.c.capability
    mine = and_(reports.c.fleet == fleet, reports.c.device == devices.c.device)
    measured = and_(mine, reports.c.error == "", reports.c.after.is_not(None))

    def newest(column: ColumnElement[Any]) -> ColumnElement[Any]:
        query = select(column).where(measured).order_by(reports.c.received_at.desc())
        return query.limit(1).correlate(devices).scalar_subquery()

    return {
        "device": devices.c.device,
        "status": devices.c.status,
        "standing": STANDING,
        "quarantine": devices.c.quarantine,
        "activity": devices.c.activity,
        "why": devices.c.why,
        "tier": func.coalesce(able["tier"].as_string(), ""),
        "release": devices.c.release,
        "head": func.coalesce(able["head"].as_string(), ""),
        "samples": func.coalesce(able["samples"].as_integer(), 0),
        "seen_at": devices.c.seen_at,
        "head_at": func.coalesce(
            newest(case((reports.c.kind == "head", reports.c.received_at), else_="")), ""
        ),
        "before": newest(reports.c.before),
        "after": newest(reports.c.after),
        "drift": standing.DRIFT,
        "epsilon": select(func.max(reports.c.metrics[EPSILON].as_float()))
        .where(mine)
        .correlate(devices)
        .scalar_subquery(),
        "outlier_score": devices.c.outlier_score,
        "attention": standing.ATTENTION,
    }


def _order(columns: dict[str, ColumnElement[Any]], query: FleetQuery) -> tuple[ColumnElement[Any], ...]:
    """By the chosen column, devices without a value after all others, then by name."""
    if not query.sort:
        return (standing.ATTENTION.desc(), devices.c.device)
    key = columns.get(query.sort, devices.c.device)
    present = key.is_not(None)
    return (present.desc(), key.desc() if query.down else key, devices.c.device)


def _filters(query: FleetQuery) -> list[ColumnElement[bool]]:
    filters: list[ColumnElement[bool]] = []
    if query.search:
        text = query.search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        columns = (
            devices.c.device,
            devices.c.status,
            STANDING,
            devices.c.quarantine,
            devices.c.activity,
            devices.c.why,
        )
        filters.append(or_(*(column.ilike(f"%{text}%", escape="\\") for column in columns)))
    if query.only in standing.ONLY:
        filters.append(standing.ONLY[query.only])
    if query.status:
        filters.append(devices.c.status == query.status)
    if query.tier:
        filters.append(devices.c.capability["tier"].as_string() == query.tier)
    return filters
