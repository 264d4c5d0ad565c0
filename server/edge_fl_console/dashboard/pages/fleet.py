"""The fleet: one table of all devices; the database searches, sorts and pages, and the address keeps the query.

Reports are read for the devices of the page only, unless it is sorted by one of their columns, so that 10,000 devices cost about as much
as 50.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from nicegui import ui
from sqlalchemy import BindParameter, ColumnElement, and_, bindparam, case, func, null, or_, select

from edge_fl.console.units import NOTHING, ago, cut, escape, number, positive, share
from edge_fl.heads.wording import DeviceWords
from edge_fl.metrics import EPSILON, FLEET, OWN_WEIGHT, PERSONAL_AFTER, TEST_EFFECTIVE, TEST_SAMPLES
from edge_fl_console.alerts import rules
from edge_fl_console.alerts.rules import AlertSettings, RulePlace
from edge_fl_console.dashboard import standing
from edge_fl_console.dashboard.live import Address, PageBoard, update
from edge_fl_console.dashboard.parts import (
    MAX_PAGE,
    TOGGLE,
    PageColumn,
    button,
    decimal,
    device_link,
    empty,
    heading,
    outlier,
    place,
    sigmas,
    tags,
    version,
    word,
)
from edge_fl_server import selectors
from edge_fl_server.registry import Database, registered_tags
from edge_fl_server.registry.registered_devices import STANDING, of_fleet
from edge_fl_server.registry.tables import devices, reports, why_blocked
from edge_fl_server.selectors import SelectorError

PER_PAGE = 50
MAX_AGENTS = 500  # different versions that are sorted
ATTENTION = "attention"
SEARCHED = ("device", "status", "quarantine", "activity", "why")  # and whether it is blocked


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
    """One device. `before` and `after` are its newest accuracies, `head_at` the time of its last fit, `drift` 0 for none. `fitted` is the
    kind of its newest head, fitted on `fit_labels` labels with `own_weight`, and its accuracy `fit_after`; `after` is of `labels` labels,
    `fleet_after` is the accuracy of the fleet's head on the same ones.

    `epsilon` is the privacy budget it has spent, None if it sends no updates with noise. `standing` is "quarantined", "revoked" or "",
    `outlier_score` 1 and above for an outlier. `reasons` are why it needs attention, empty if it does not, and
    `attention` how urgently.
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
    agent: str | None = None
    tags: Mapping[str, str] = {}
    fitted: str = ""
    fit_labels: int = 0
    own_weight: float = 0.0
    fit_after: float | None = None
    fit_scenes: float | None = None
    labels: float = 0.0
    effective: float | None = None
    fleet_after: float | None = None
    reasons: tuple[str, ...] = ()
    attention: int = 0

    @property
    def words(self) -> DeviceWords:
        """What the device predicts with, and its accuracy."""
        full = self.tier == "full"
        found = {
            PERSONAL_AFTER: self.after if full else self.fit_after,
            TEST_SAMPLES: self.labels if full or self.fit_after is not None else self.fit_scenes,
            TEST_EFFECTIVE: self.effective,
            FLEET: self.fleet_after,
            OWN_WEIGHT: self.own_weight,
        }
        reported = self.after is not None if full else bool(self.fitted)
        metrics = {name: value for name, value in found.items() if value is not None} if reported else None
        return DeviceWords.of_report(self.fitted, self.fit_labels, metrics, full=full)


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


def read(
    db: Database,
    fleet: str,
    query: FleetQuery,
    *,
    per_page: int = PER_PAGE,
    settings: AlertSettings = rules.DEFAULT,
) -> FleetPage:
    """One page of the fleet. Raises RunError when the registry does not respond."""
    columns = _columns(fleet)
    found = rules.conditions(RulePlace(db, fleet), settings, of_devices=True)
    reasons, urgency = rules.by_device(found), rules.urgency(found)
    matching, wrong = and_(of_fleet(fleet), *_filters(query)), ""
    if query.only == ATTENTION or query.only in found:
        matching = and_(matching, _among(reasons if query.only == ATTENTION else found[query.only]))
    if query.where:
        try:
            names = selectors.selected(db, fleet, query.where)
        except SelectorError as error:
            names, wrong = [], error.message
        matching = and_(matching, _among(names))
    by_status = standing.by_status(db, fleet)
    agents = _agents(db, fleet) if query.sort == "agent" else []
    with db.reading() as connection:
        matches = connection.execute(select(func.count()).where(matching)).scalar_one()
        pages = max(1, -(-matches // per_page))
        number = min(max(query.page, 0), pages - 1)
        listed, page = (
            select(devices.c.device).where(matching),
            slice(number * per_page, (number + 1) * per_page),
        )
        if query.sort in ("", ATTENTION):
            every = list(connection.execute(listed.order_by(devices.c.device)).scalars())
            urgent_first = query.down or not query.sort
            every.sort(key=lambda name: urgency.get(name, 0), reverse=urgent_first)  # stable: then by name
            names = every[page]
        else:
            ordered = listed.order_by(*_order(columns, query, agents))
            names = list(connection.execute(ordered.limit(per_page).offset(page.start)).scalars())
    shown = select(*(column.label(name) for name, column in columns.items()))
    rows = {
        row.device: row
        for row in db.find(shown.where(of_fleet(fleet), devices.c.device.in_(names)), FleetRow)
    }
    tagged = registered_tags.of_devices(db, fleet, devices=names)
    return FleetPage(
        tuple(
            replace(
                rows[name],
                tags=tagged.get(name, {}),
                reasons=tuple(reasons.get(name, ())),
                attention=urgency.get(name, 0),
            )
            for name in names
            if name in rows
        ),
        matches,
        sum(by_status.values()),
        by_status,
        {ATTENTION: len(reasons)}
        | ({query.only: len(found[query.only])} if query.only in found else {})
        | standing.counts(db, fleet, standing.ONLY),
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

    of_heads = and_(mine, reports.c.error == "", reports.c.kind == "head")

    def of_newest_head(column: ColumnElement[Any]) -> ColumnElement[Any]:
        query = select(column).where(of_heads).order_by(reports.c.received_at.desc())
        return query.limit(1).correlate(devices).scalar_subquery()

    def of_shown(name: str) -> ColumnElement[Any]:
        metric = reports.c.metrics[name].as_float()
        return case((able["tier"].as_string() == "full", newest(metric)), else_=of_newest_head(metric))

    return {
        **{name: devices.c[name] for name in (*SEARCHED, "release", "seen_at", "outlier_score")},
        "standing": STANDING,
        "tier": func.coalesce(able["tier"].as_string(), ""),
        "head": func.coalesce(able["head"].as_string(), ""),
        "samples": func.coalesce(able["samples"].as_integer(), 0),
        "head_at": func.coalesce(
            newest(case((reports.c.kind == "head", reports.c.received_at), else_="")), ""
        ),
        "before": newest(reports.c.before),
        "after": newest(reports.c.after),
        "drift": func.coalesce(able["drift"].as_float(), 0.0),
        "epsilon": select(func.max(reports.c.metrics[EPSILON].as_float()))
        .where(mine)
        .correlate(devices)
        .scalar_subquery(),
        "agent": func.nullif(selectors.ATTRIBUTES["agent"], ""),
        "fitted": func.coalesce(of_newest_head(reports.c.head), ""),
        "fit_labels": func.coalesce(of_newest_head(reports.c.samples), 0),
        "fit_scenes": of_newest_head(reports.c.metrics[TEST_SAMPLES].as_float()),
        "fit_after": of_newest_head(reports.c.after),
        "own_weight": func.coalesce(of_newest_head(reports.c.metrics[OWN_WEIGHT].as_float()), 0.0),
        "labels": func.coalesce(of_shown(TEST_SAMPLES), 0.0),
        "effective": of_shown(TEST_EFFECTIVE),
        "fleet_after": of_shown(FLEET),
    }


def _among(names: Collection[str]) -> ColumnElement[bool]:
    """The condition of these devices, as literal values: a large fleet has more devices than a statement may have parameters."""
    chosen: BindParameter[Any] = bindparam(
        None, list(names), expanding=True, literal_execute=True, unique=True
    )
    return devices.c.device.in_(chosen)


def _agents(db: Database, fleet: str) -> list[str]:
    """The versions of the fleet's agents, ascending; the first MAX_AGENTS of them."""
    agent = selectors.ATTRIBUTES["agent"].label("agent")
    rows = db.rows(select(agent).where(of_fleet(fleet), agent != "").distinct().limit(MAX_AGENTS))
    known = ((selectors.version(row.agent), row.agent) for row in rows)
    return [agent for _, agent in sorted((version, agent) for version, agent in known if version)]


def _order(
    columns: dict[str, ColumnElement[Any]], query: FleetQuery, agents: Sequence[str]
) -> tuple[ColumnElement[Any], ...]:
    """By the chosen column, devices without a value after all others, then by name; `agents` are the versions in their order."""
    key = columns.get(query.sort, devices.c.device)
    if query.sort == "agent":
        places = [(key == agent, place) for place, agent in enumerate(agents)]
        key = case(*places) if places else null()
    present = key.is_not(None)
    return (present.desc(), key.desc() if query.down else key, devices.c.device)


def _filters(query: FleetQuery) -> list[ColumnElement[bool]]:
    filters: list[ColumnElement[bool]] = []
    if query.search:
        columns = (STANDING, *(devices.c[name] for name in SEARCHED))
        filters.append(or_(*(column.icontains(query.search, autoescape=True) for column in columns)))
    if query.only in standing.ONLY:
        filters.append(standing.ONLY[query.only])
    if query.status:
        filters.append(standing.STATUS.in_([query.status]))
    if query.tier:
        filters.append(devices.c.capability["tier"].as_string() == query.tier)
    return filters


def _named(value: str) -> str:
    return escape(cut(value)) or NOTHING


def _status(row: FleetRow) -> str:
    busy = f' <span class="quiet">{escape(row.activity)}</span>' if row.activity not in ("", "idle") else ""
    tag = f' <span class="tag bad">{row.standing}</span>' if row.standing else ""
    return tag if row.standing == "revoked" else f"{word(row.status)}{busy}{tag}"


def message(row: FleetRow) -> str:
    """Why the device needs attention, and what to do; for a revoked one, which needs none, how to admit it again."""
    if row.standing == "revoked":
        return why_blocked(row.device, row.standing, "")
    return "; ".join(row.reasons)


def _accuracy(row: FleetRow) -> str:
    """The accuracy with what it was measured on; the fleet's head on the same has its own column."""
    found = row.words.measured
    if found.accuracy is None:
        return f'<span class="quiet">{escape(found.figure)}</span>'
    return escape(found.figure) + (f' <span class="quiet">({found.reach})</span>' if found.reach else "")


def _head(row: FleetRow) -> str:
    """What the device predicts with."""
    return _named(row.words.head)


def _message(row: FleetRow) -> str:
    """The message, and the buttons to act on it."""
    text = escape(message(row))
    if row.standing != "quarantined":
        return text
    buttons = button("admit", row.device, "Admit") + " " + button("revoke", row.device, "Revoke", "danger")
    return f"<p>{text}</p><p>{buttons}</p>"


def _device(row: FleetRow) -> str:
    """A link to the device's page, and its tags."""
    return device_link(row.device) + tags(row.tags)


COLUMNS = (
    PageColumn("Device", "device", device_link, True, cell=_device),
    PageColumn("Status", "status", sortable=True, cell=_status, wraps=True),
    PageColumn("Before %", "before", share, True, minor=True),
    PageColumn("Accuracy after", "after", share, True, cell=_accuracy, wraps=True),
    PageColumn("Fleet's head %", "fleet_after", share, True, minor=True),
    PageColumn("Message", ATTENTION, number, True, _message),
    PageColumn("Release", "release", positive, True),
    PageColumn("Tier", "tier", _named, True, minor=True),
    PageColumn("Head", "head", _named, True, minor=True, cell=_head, wraps=True),
    PageColumn("Head age", "head_at", ago, True, minor=True),
    PageColumn("Agent", "agent", version, True),
    PageColumn("Samples", "samples", number, True, minor=True),
    PageColumn("Last seen", "seen_at", ago, True, minor=True),
    PageColumn("Drift", "drift", sigmas, True, minor=True),
    PageColumn("Outlier", "outlier_score", outlier, True, minor=True),
    PageColumn("Epsilon", "epsilon", decimal, True, minor=True),
)
SORTS = {"": "needs attention first"} | {column.name: column.label for column in COLUMNS if column.sortable}
FALLING = frozenset(column.name for column in COLUMNS if column.falling)
"""Columns that are sorted from the largest at first."""
DEFAULT = FleetQuery()
TIERS = {"": "all tiers", "head": "head", "full": "full"}
ONLY = {"": "all", ATTENTION: "needs attention"}
COMMANDS = (
    "edge-fl device run --host BROKER --id pi-07 --data folder:/srv/images\nedge-fl fleet up --devices 12"
)


def query_of(address: Address) -> FleetQuery:
    """The query of an address; the default for an invalid one."""
    try:
        return msgspec.convert(dict(address), FleetQuery, strict=False)
    except msgspec.ValidationError:
        return DEFAULT


def address_of(query: FleetQuery) -> str:
    """The address of a query, without fields that have their default."""
    fields = {name: value for name, value in msgspec.structs.asdict(query).items() if value}
    return urlencode(
        {
            name: int(value) if value is True else value
            for name, value in fields.items()
            if value != getattr(DEFAULT, name)
        }
    )


def chosen(query: FleetQuery) -> int:
    """The number of filters in use, with the order."""
    return sum(map(bool, (query.where, query.only, query.status, query.tier, query.sort)))


def statuses(page: FleetPage) -> dict[str, str]:
    """Status -> its label with the number of devices; "" for all."""
    return {"": "all states"} | {status: f"{status} {count:,}" for status, count in page.by_status.items()}


def groups(page: FleetPage) -> dict[str, str]:
    """Filter -> its label with the number of devices; "" for all."""
    counts = {"": page.total, **page.by_only}
    return {name: f"{ONLY.get(name, name)} {count:,}" for name, count in counts.items()}


def note(page: FleetPage) -> str:
    """The reason why the table has no rows."""
    if page.wrong:
        return empty("Wrong selector", page.wrong)
    if not page.total:
        return empty("No device yet", "Devices appear here when they connect to the broker.", COMMANDS)
    return "" if page.rows else empty("No matching device", "No device matches the search and the filters.")


def visible(page: FleetPage) -> list[str]:
    """Names of the columns to show: of those that few fleets need, the ones with a value."""
    absent = {
        "epsilon": all(row.epsilon is None for row in page.rows),
        "fleet_after": all(row.fleet_after is None for row in page.rows),
        "drift": not any(row.drift for row in page.rows),
        "outlier_score": not any(row.outlier_score for row in page.rows),
    }
    return [column.name for column in COLUMNS if not absent.get(column.name)]


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    query = query_of(address)

    def find() -> FleetPage:
        return read(board.context.db, board.context.fleet, query, settings=board.context.alerts)

    async def change(**fields: Any) -> None:
        nonlocal query
        query = replace(query, **{"page": 0, **fields})
        ui.navigate.history.replace(f"/fleet?{address_of(query)}".removesuffix("?"))
        await board.refresh()

    async def turn(event: Any) -> None:
        pagination = event.args["pagination"]
        sort, number = str(pagination["sortBy"] or ""), max(place(pagination["page"]) - 1, 0)
        await change(sort=sort, down=bool(sort and pagination["descending"]), page=number)

    async def sort_by(event: Any) -> None:
        await change(sort=str(event.args), down=str(event.args) in FALLING)

    ui.html(heading("Fleet"), sanitize=False)
    with ui.element("div").classes("bar"):
        search = ui.input(placeholder="Search  /", value=query.search)
        search.props('type=search dense outlined debounce=200 aria-label="Search devices"')
        search.on_value_change(lambda event: change(search=str(event.value or "")[:80]))
        with board.filters(lambda: chosen(query)):
            where = ui.input(placeholder="Selector, such as site=berlin", value=query.where)
            where.props('dense outlined debounce=600 aria-label="Select devices by tags and attributes"')
            where.on_value_change(lambda event: change(where=str(event.value or "").strip()[:1000]))
            only = ui.toggle({query.only: query.only or "all"}, value=query.only).props(TOGGLE)
            only.on_value_change(lambda event: change(only=event.value))
            status = ui.toggle({query.status: query.status or "all states"}, value=query.status).props(TOGGLE)
            status.on_value_change(lambda event: change(status=event.value))
            tier = ui.toggle(TIERS, value=query.tier if query.tier in TIERS else "").props(TOGGLE)
            tier.on_value_change(lambda event: change(tier=event.value))
            sort = ui.element("select").props('aria-label="Sort"').classes("phone")
            with sort:
                for name, label in SORTS.items():
                    selected = " selected" if name == query.sort else ""
                    ui.element("option").props(f'value="{name}" label="Sort: {label}"{selected}')
            sort.on("change", sort_by, js_handler="(event) => emit(event.target.value)")
    board.html(find, note)
    table = board.table(find, COLUMNS, lambda page: page.rows, per_page=PER_PAGE)

    def show(page: FleetPage) -> None:
        for toggle, options, value in (
            (status, statuses(page), query.status),
            (only, groups(page), query.only),
        ):
            if options != toggle.options:
                toggle.set_options(options, value=value if value in options else "")
        update(table, "visible-columns", visible(page))
        pagination = {"sortBy": query.sort, "descending": query.down, "page": page.page + 1}
        update(table, "pagination", {**pagination, "rowsPerPage": PER_PAGE, "rowsNumber": page.matches})

    table.on("request", turn)
    board.part(find, show)
