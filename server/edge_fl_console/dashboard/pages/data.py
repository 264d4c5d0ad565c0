"""The data of the fleet: a dot per device and class, its area the number of samples."""

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from msgspec import Struct
from nicegui import ui
from sqlalchemy import func, select

from edge_fl.console.units import few, number
from edge_fl_console.dashboard import charts
from edge_fl_console.dashboard.live import Address, PageBoard, update
from edge_fl_console.dashboard.parts import device_link, empty, facts, heading, place
from edge_fl_server.registry import Database
from edge_fl_server.registry.registered_devices import of_fleet
from edge_fl_server.registry.tables import devices

PER_PAGE = 60


class DataPage(Struct, frozen=True):
    """Device -> samples per class, for one page out of `total` devices that reported data. Classes are numbered.

    `beyond`: devices with samples of classes that the fleet does not have, which are left out.
    """

    counts: dict[str, tuple[int, ...]]
    total: int
    page: int
    pages: int
    beyond: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[int, ...]:
        """Samples of each class over the page."""
        return tuple(map(sum, zip_longest(*self.counts.values(), fillvalue=0)))


def read(
    db: Database, fleet: str, number: int = 0, *, per_page: int = PER_PAGE, classes: int = 0
) -> DataPage:
    """One page of devices, by name. `classes` of the fleet; 0: unknown, then as many as most of these devices name."""
    spread = devices.c.capability["samples_per_class"]
    mine = of_fleet(fleet) & (devices.c.capability["samples"].as_integer() > 0)
    with db.reading() as connection:
        total = connection.execute(select(func.count()).select_from(devices).where(mine)).scalar_one()
        pages = max(1, -(-total // per_page))
        number = min(max(number, 0), pages - 1)
        query = select(devices.c.device, spread.as_json()).where(mine).order_by(devices.c.device)
        rows = connection.execute(query.limit(per_page).offset(number * per_page))
        counts = {device: tuple(row) for device, row in rows if row}
    classes = classes or _usual(map(len, counts.values()))
    beyond = tuple(device for device, row in counts.items() if any(row[classes:]))
    shown = {device: row[:classes] for device, row in counts.items()}
    return DataPage(shown, total, number, pages, beyond)


def _usual(lengths: Iterable[int]) -> int:
    """The most frequent of these numbers, of several the largest; 0 without any."""
    found = Counter(lengths)
    return max(found, key=lambda length: (found[length], length), default=0)


def body(page: DataPage) -> str:
    """The sums over one page of devices."""
    if not page.counts:
        return empty("No data reported yet", "Devices report their samples per class when they connect.")
    totals = page.totals
    most, least = max(totals), min(totals)
    largest = max(page.counts, key=lambda device: sum(page.counts[device]))
    left_out = (
        f'<p class="quiet after">Classes beyond the fleet\'s are not shown: {few(page.beyond)} reported some.</p>'
        if page.beyond
        else ""
    )
    return left_out + facts(
        {
            "Devices": number(page.total),
            "Samples on this page": number(sum(totals)),
            "Classes": number(len(totals)),
            "Most of one class": f"{number(most)} {_class(totals.index(most))}",
            "Least of one class": f"{number(least)} {_class(totals.index(least))}",
            "Most of one device": f"{number(sum(page.counts[largest]))} {device_link(largest)}",
        }
    )


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    shown = place(address.get("page", ""))

    def find() -> DataPage:
        return read(board.context.db, board.context.fleet, shown, classes=board.context.classes)

    async def turn(event: Any) -> None:
        nonlocal shown
        shown = max(place(event.value) - 1, 0)
        ui.navigate.history.replace(f"/data?page={shown}" if shown else "/data")
        await board.refresh()

    ui.html(heading("Data"), sanitize=False)
    board.html(find, body)
    board.chart(
        find,
        lambda page: charts.dots(page.counts),
        "Samples by device and class; classes are numbered as in the dataset",
    )
    pages = ui.pagination(1, 1, value=shown + 1, on_change=turn)
    pages.props("max-pages=7").set_visibility(False)

    def show(page: DataPage) -> None:
        update(pages, "max", page.pages)
        pages.set_visibility(page.pages > 1)

    board.part(find, show)


def _class(place: int) -> str:
    return f'<span class="quiet">class {place}</span>'
