"""Samples per class of a page of devices, as the devices reported them."""

from itertools import zip_longest

from msgspec import Struct
from sqlalchemy import func, select

from edge_fl_server.registry import Database
from edge_fl_server.registry.devices import of_fleet
from edge_fl_server.registry.tables import devices

PER_PAGE = 60


class DataPage(Struct, frozen=True):
    """Device -> samples per class, for one page out of `total` devices that reported data. Classes are numbered."""

    counts: dict[str, tuple[int, ...]]
    total: int
    page: int
    pages: int

    @property
    def totals(self) -> tuple[int, ...]:
        """Samples of each class over the page."""
        return tuple(map(sum, zip_longest(*self.counts.values(), fillvalue=0)))


def page(db: Database, fleet: str, number: int = 0, *, per_page: int = PER_PAGE) -> DataPage:
    """One page of devices, by name."""
    spread = devices.c.capability["samples_per_class"]
    mine = of_fleet(fleet) & (devices.c.capability["samples"].as_integer() > 0)
    with db.reading() as connection:
        total = connection.execute(select(func.count()).select_from(devices).where(mine)).scalar_one()
        pages = max(1, -(-total // per_page))
        number = min(max(number, 0), pages - 1)
        query = select(devices.c.device, spread.as_json()).where(mine).order_by(devices.c.device)
        rows = connection.execute(query.limit(per_page).offset(number * per_page))
        counts = {device: tuple(row or ()) for device, row in rows}
    return DataPage({name: row for name, row in counts.items() if row}, total, number, pages)
