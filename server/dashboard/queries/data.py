"""Who has which data: a page of devices with their samples per class, as far as they said."""

from __future__ import annotations

from msgspec import Struct
from sqlalchemy import func, select

from server.registry import Database
from server.registry.tables import devices

PER_PAGE = 60


class DataPage(Struct, frozen=True):
    """Samples per class by device; `totals` are over the page, `found` counts the devices that said what they have."""

    counts: dict[str, tuple[int, ...]]
    found: int
    page: int
    pages: int

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes are numbered: their names stay with the run."""
        return tuple(map(str, range(max((len(row) for row in self.counts.values()), default=0))))

    @property
    def totals(self) -> tuple[int, ...]:
        """Samples of each class over the page."""
        return tuple(
            sum(row[place] for row in self.counts.values() if place < len(row))
            for place in range(len(self.classes))
        )


def page(db: Database, fleet: str, number: int = 0, *, per_page: int = PER_PAGE) -> DataPage:
    """One page of devices by name."""
    spread = devices.c.capability["samples_per_class"]
    mine = (devices.c.fleet == fleet) & (devices.c.capability["samples"].as_integer() > 0)
    with db.reading() as connection:
        found = connection.execute(select(func.count()).select_from(devices).where(mine)).scalar_one()
        pages = max(1, -(-found // per_page))
        number = min(max(number, 0), pages - 1)
        wanted = select(devices.c.device, spread.as_json()).where(mine).order_by(devices.c.device)
        rows = connection.execute(wanted.limit(per_page).offset(number * per_page))
        counts = {device: tuple(row or ()) for device, row in rows}
    return DataPage({name: row for name, row in counts.items() if row}, found, number, pages)
