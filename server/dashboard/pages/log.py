"""The events of a fleet, the newest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nicegui import ui

from server.dashboard.live import Address, Board
from server.dashboard.pages.parts import columns, empty, heading, link, word
from server.dashboard.queries import log
from server.dashboard.queries.log import LEVELS, Event
from server.report.formatting import clock, escape

COLUMNS = columns(("Time, UTC", "Level", "Kind", "Subject", "Text"))
PATHS = {"run": "/run/", "round": "/run/", "rejected": "/device/", "request": "/device/", "quarantine": "/device/"}


def note(events: Sequence[Event]) -> str:
    """The empty state."""
    return "" if events else empty("No events", "Runs, rounds, releases, rejections and failures are listed here.")


def rows(events: Sequence[Event]) -> Iterator[tuple[str, ...]]:
    """The cells of each event."""
    for event in events:
        text = event.text.strip(": ").replace("timed_out", "timed out").replace("rolled_back", "rolled back")
        path = PATHS.get(event.kind)
        subject = link(path, event.subject) if path else f'<a href="/releases">{escape(event.subject)}</a>'
        yield clock(event.at), word(event.level), escape(event.kind), subject, escape(text)


def build(board: Board, address: Address) -> None:
    """Add the page's parts."""
    level = address.get("level", "")

    def find() -> tuple[Event, ...]:
        return log.newest(board.context.db, board.context.fleet, level)

    async def choose(event: Any) -> None:
        nonlocal level
        level = event.value
        ui.navigate.history.replace(f"/log?level={level}" if level else "/log")
        await board.refresh()

    ui.html(heading("Log"), sanitize=False)
    with ui.element("div").classes("bar"):
        ui.toggle({"": "all"} | {name: name for name in LEVELS}, value=level if level in LEVELS else "", on_change=choose)
    board.html(find, note)
    board.table(find, COLUMNS, rows)
