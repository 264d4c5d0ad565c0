"""The fleet: one table of all devices; the database searches, sorts and pages, and the address keeps the query."""

from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace
from nicegui import ui

from edge_fl.console.formatting import NOTHING, ago, escape, number, positive, share
from edge_fl_console.dashboard import reasons
from edge_fl_console.dashboard.live import Address, PageBoard, update
from edge_fl_console.dashboard.parts import (
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
    word,
)
from edge_fl_console.dashboard.queries import fleet
from edge_fl_console.dashboard.queries.fleet import PER_PAGE, FleetPage, FleetQuery, FleetRow


def _named(value: str) -> str:
    return escape(value) or NOTHING


def _status(row: FleetRow) -> str:
    busy = f' <span class="quiet">{escape(row.activity)}</span>' if row.activity not in ("", "idle") else ""
    standing = f' <span class="tag bad">{row.standing}</span>' if row.standing else ""
    return f"{word(row.status)}{busy}{standing}"


def message(row: FleetRow) -> str:
    """Why the device needs attention, and what to do; "" if it does not."""
    parts = []
    if row.standing == "revoked":
        parts.append(f"certificate revoked; for a new one: edge-fl fleet enrol {row.device}")
    if row.standing == "quarantined":
        parts.append(reasons.quarantined(row.quarantine))
    if row.status == "lost":
        parts.append("connection lost; it reconnects by itself")
    if row.why:
        parts.append(reasons.alerted(row.why))
    if row.outlier_score >= 1:
        parts.append("its newest update differs strongly from the others'")
    if row.drift:
        parts.append("its images have changed since its head was fitted")
    return "; ".join(parts)


def _message(row: FleetRow) -> str:
    """The message, and the buttons to act on it."""
    text = escape(message(row))
    if row.standing != "quarantined":
        return text
    buttons = button("admit", row.device, "Admit") + " " + button("revoke", row.device, "Revoke", "danger")
    return f"<p>{text}</p><p>{buttons}</p>"


COLUMNS = (
    PageColumn("Device", "device", device_link, True),
    PageColumn("Status", "status", sortable=True, cell=_status),
    PageColumn("Before %", "before", share, True, minor=True),
    PageColumn("Accuracy after %", "after", share, True),
    PageColumn("Message", "attention", number, True, _message),
    PageColumn("Release", "release", positive, True),
    PageColumn("Tier", "tier", _named, True, minor=True),
    PageColumn("Head", "head", _named, True, minor=True),
    PageColumn("Head age", "head_at", ago, True, minor=True),
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
ONLY = {"": "all", "attention": "needs attention"}
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
        "drift": not any(row.drift for row in page.rows),
        "outlier_score": not any(row.outlier_score for row in page.rows),
    }
    return [column.name for column in COLUMNS if not absent.get(column.name)]


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    query = query_of(address)

    def find() -> FleetPage:
        return fleet.page(board.context.db, board.context.fleet, query)

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
                chosen = " selected" if name == query.sort else ""
                ui.element("option").props(f'value="{name}" label="Sort: {label}"{chosen}')
        sort.on("change", sort_by, js_handler="(event) => emit(event.target.value)")
    board.html(find, note)
    table = board.table(find, COLUMNS, lambda page: page.rows, per_page=PER_PAGE)

    def show(page: FleetPage) -> None:
        for toggle, options, chosen in (
            (status, statuses(page), query.status),
            (only, groups(page), query.only),
        ):
            if options != toggle.options:
                toggle.set_options(options, value=chosen if chosen in options else "")
        update(table, "visible-columns", visible(page))
        pagination = {"sortBy": query.sort, "descending": query.down, "page": page.page + 1}
        update(table, "pagination", {**pagination, "rowsPerPage": PER_PAGE, "rowsNumber": page.matches})

    table.on("request", turn)
    board.part(find, show)
