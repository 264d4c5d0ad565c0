"""Who has which data: a dot per device and class, its area the number of samples."""

from __future__ import annotations

from server.dashboard.pages.parts import empty, facts, pager
from server.dashboard.queries.data import PER_PAGE, DataPage
from server.report import svg
from server.report.formatting import number

PER_PANEL = 20
"""Devices below each other; more stand beside them where there is room."""


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
            "Most of one class": f"{number(max(totals))} {_of_class(totals.index(max(totals)))}",
            "Least of one class": f"{number(min(totals))} {_of_class(totals.index(min(totals)))}",
        },
        big=True,
    )
    most = max(max(row) for row in page.counts.values())
    rows = list(page.counts.items())
    panels = "".join(
        svg.dots(dict(rows[first : first + PER_PANEL]), page.classes, "/device/", most)
        for first in range(0, len(rows), PER_PANEL)
    )
    to = {place: f"page={place}" if place else "" for place in (page.page - 1, page.page + 1)}
    return (
        f'<div class="sheet padded">{shown}</div><h2>Samples per device and class</h2>'
        f'<div class="sheet padded panels">{panels}</div>{pager(page.page, page.pages, page.found, PER_PAGE, to, "devices")}'
    )


def _of_class(place: int) -> str:
    return f'<span class="quiet">class {place}</span>'
