"""Who has which data: a dot per device and class, its area the number of samples."""

from __future__ import annotations

from server.view import svg
from server.view.dashboard.pages.parts import empty, facts, pager
from server.view.dashboard.queries.data import PER_PAGE, DataPage
from server.view.words import number


def body(page: DataPage) -> str:
    """The dots of one page of devices, and what they sum up to."""
    if not page.counts:
        return empty(
            "No device has said what data it has",
            "Counts per class come with a device's description of itself.",
        )
    totals = page.totals
    shown = facts(
        {
            "Devices": number(page.found),
            "Samples on this page": number(sum(totals)),
            "Classes": number(len(totals)),
            "Largest class": number(max(totals)),
            "Smallest class": number(min(totals)),
        },
        big=True,
    )
    dots = svg.dots(page.counts, page.classes, "/device/")
    to = {place: f"page={place}" if place else "" for place in (page.page - 1, page.page + 1)}
    return (
        f'<div class="sheet padded">{shown}</div><h2>Samples per device and class</h2>'
        f'<div class="sheet padded">{dots}</div>{pager(page.page, page.pages, page.found, PER_PAGE, to, "devices")}'
    )
