"""The data of the fleet: a dot per device and class, its area the number of samples."""

from typing import Any

from nicegui import ui

from edge_fl.console.formatting import number
from edge_fl_console.dashboard import charts
from edge_fl_console.dashboard.live import Address, PageBoard, update
from edge_fl_console.dashboard.parts import empty, facts, heading, place
from edge_fl_console.dashboard.queries import data
from edge_fl_console.dashboard.queries.data import DataPage


def body(page: DataPage) -> str:
    """The sums over one page of devices."""
    if not page.counts:
        return empty("No data reported yet", "Devices report their samples per class when they connect.")
    totals = page.totals
    most, least = max(totals), min(totals)
    return facts(
        {
            "Devices": number(page.total),
            "Samples on this page": number(sum(totals)),
            "Classes": number(len(totals)),
            "Most of one class": f"{number(most)} {_class(totals.index(most))}",
            "Least of one class": f"{number(least)} {_class(totals.index(least))}",
        },
        big=True,
    )


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    shown = place(address.get("page", ""))

    def find() -> DataPage:
        return data.page(board.context.db, board.context.fleet, shown)

    async def turn(event: Any) -> None:
        nonlocal shown
        shown = max(place(event.value) - 1, 0)
        ui.navigate.history.replace(f"/data?page={shown}" if shown else "/data")
        await board.refresh()

    ui.html(heading("Data"), sanitize=False)
    board.html(find, body)
    board.chart(find, lambda page: charts.dots(page.counts), "Samples per device and class")
    pages = ui.pagination(1, 1, value=shown + 1, on_change=turn)
    pages.props("max-pages=7").set_visibility(False)

    def show(page: DataPage) -> None:
        update(pages, "max", page.pages)
        pages.set_visibility(page.pages > 1)

    board.part(find, show)


def _class(place: int) -> str:
    return f'<span class="quiet">class {place}</span>'
