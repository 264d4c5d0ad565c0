"""The fleet: one table of all devices; the database searches, sorts and pages, and the address keeps the query."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace
from nicegui import ui

from edge_fl_server.dashboard.live import Address, Board, update
from edge_fl_server.dashboard.pages.parts import (
    TOGGLE,
    Column,
    bars,
    decimal,
    device_link,
    empty,
    heading,
    outlier,
    sigmas,
    word,
)
from edge_fl_server.dashboard.queries import fleet
from edge_fl_server.dashboard.queries.fleet import PER_PAGE, FleetPage, FleetQuery, FleetRow
from edge_fl_server.report.formatting import NOTHING, ago, escape, number, positive, share, size


def _named(value: str) -> str:
    return escape(value) or NOTHING


def _status(row: FleetRow) -> str:
    busy = f' <span class="quiet">{escape(row.activity)}</span>' if row.activity not in ("", "idle") else ""
    standing = f' <span class="tag bad">{row.standing}</span>' if row.standing else ""
    return f'<span title="{escape(row.why)}">{word(row.status)}{busy}{standing}</span>'


COLUMNS = (
    Column("Device", "device", device_link, True),
    Column("Status", "status", sortable=True, cell=_status),
    Column("Tier", "tier", _named, True),
    Column("Method", "method", _named, True),
    Column("Release", "release", positive, True),
    Column("Head", "head", _named, True),
    Column("Head age", "head_at", ago, True),
    Column("Samples", "samples", number, True),
    Column("By class", "samples_per_class", bars),
    Column("Before %", "before", share, True),
    Column("After %", "after", share, True),
    Column("Last seen", "seen_at", ago, True),
    Column("Bytes today", "bytes_today", size, True, lambda row: size(row.bytes_today or None)),
    Column("Drift", "drift", sigmas, True),
    Column("Outlier score", "outlier_score", outlier, True),
    Column("Epsilon", "epsilon", decimal, True),
)
DEFAULT = FleetQuery()
TIERS = {"": "all tiers", "head": "head", "full": "full"}
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
    return {"": f"all {page.total:,}"} | {
        status: f"{status} {count:,}" for status, count in page.by_status.items()
    }


def note(page: FleetPage) -> str:
    """The reason why the table has no rows."""
    if not page.total:
        return empty("No device yet", "Devices appear here when they connect to the broker.", COMMANDS)
    return "" if page.rows else empty("No matching device", "No device matches the search and the filters.")


def visible(page: FleetPage) -> list[str]:
    """Names of the columns to show: epsilon only in fleets that send updates with noise."""
    private = any(row.epsilon is not None for row in page.rows)
    return [column.name for column in COLUMNS if private or column.name != "epsilon"]


def build(board: Board, address: Address) -> None:
    """Add the page's parts."""
    query = query_of(address)

    def find() -> FleetPage:
        return fleet.page(board.context.db, board.context.fleet, query)

    async def change(**fields: Any) -> None:
        nonlocal query
        query = replace(query, **{"page": 0, **fields})
        ui.navigate.history.replace(f"/?{address_of(query)}".removesuffix("?"))
        await board.refresh()

    async def turn(event: Any) -> None:
        pagination = event.args["pagination"]
        await change(sort=pagination["sortBy"], down=pagination["descending"], page=pagination["page"] - 1)

    ui.html(heading("Fleet"), sanitize=False)
    with ui.element("div").classes("bar"):
        search = ui.input(placeholder="Search  /", value=query.search)
        search.props('type=search dense outlined debounce=200 aria-label="Search devices"')
        search.on_value_change(lambda event: change(search=str(event.value or "")[:80]))
        status = ui.toggle({query.status: query.status or "all"}, value=query.status).props(TOGGLE)
        status.on_value_change(lambda event: change(status=event.value))
        tier = ui.toggle(TIERS, value=query.tier if query.tier in TIERS else "").props(TOGGLE)
        tier.on_value_change(lambda event: change(tier=event.value))
    board.html(find, note)
    table = board.table(find, COLUMNS, lambda page: page.rows, per_page=PER_PAGE)

    def show(page: FleetPage) -> None:
        if (options := statuses(page)) != status.options:
            status.set_options(options, value=query.status)
        update(table, "visible-columns", visible(page))
        pagination = {"sortBy": query.sort, "descending": query.down, "page": page.page + 1}
        update(table, "pagination", {**pagination, "rowsPerPage": PER_PAGE, "rowsNumber": page.matches})

    table.on("request", turn).classes("named")
    board.part(find, show)
