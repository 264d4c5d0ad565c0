"""The events of a fleet, the newest first."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from edge_fl_server.dashboard.live import Address, Board
from edge_fl_server.dashboard.pages.parts import TOGGLE, Column, device_link, empty, heading, run_link, word
from edge_fl_server.dashboard.queries import log
from edge_fl_server.dashboard.queries.log import LEVELS, Event
from edge_fl_server.report.formatting import clock, escape

DEVICES = frozenset({"rejected", "request", "quarantine", "revoked"})
RUNS = frozenset({"run", "round"})
"""Kinds of events whose subject is a device or a run; of all others it is a release."""


def _text(text: str) -> str:
    return escape(text.strip(": ").replace("timed_out", "timed out").replace("rolled_back", "rolled back"))


def _subject(event: Event) -> str:
    if event.kind in DEVICES:
        return device_link(event.subject)
    return (
        run_link(event.subject) if event.kind in RUNS else f'<a href="/releases">{escape(event.subject)}</a>'
    )


COLUMNS = (
    Column("Time, UTC", "at", clock),
    Column("Level", "level", word),
    Column("Kind", "kind"),
    Column("Subject", "subject", cell=_subject),
    Column("Text", "text", _text),
)
NOTE = empty("No events", "Runs, rounds, releases, rejections and failures are listed here.")


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
        ui.toggle(
            {"": "all"} | {name: name for name in LEVELS},
            value=level if level in LEVELS else "",
            on_change=choose,
        ).props(TOGGLE)
    board.html(find, lambda events: "" if events else NOTE)
    board.table(find, COLUMNS, lambda events: events)
