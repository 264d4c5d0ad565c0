"""The events of a fleet, the newest first."""

from typing import Any

from nicegui import ui

from edge_fl.console.formatting import clock, escape
from edge_fl_console.dashboard import reasons
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.parts import TOGGLE, PageColumn, device_link, empty, heading, run_link, word
from edge_fl_console.dashboard.queries import log
from edge_fl_console.dashboard.queries.log import LEVELS, Event

DEVICES = frozenset({"rejected", "request", "quarantine", "revoked"})
RUNS = frozenset({"run", "round"})
"""Kinds of events whose subject is a device or a run; of all others it is a release."""


def text(event: Event) -> str:
    """What happened, and how often since when."""
    shown = event.text.strip(": ").replace("timed_out", "timed out").replace("rolled_back", "rolled back")
    shown = shown.removeprefix("replaced: ")
    if event.kind == "rejected":
        reason, _, detail = shown.partition(": ")
        shown = reasons.rejected(reason) + (f": {detail}" if detail else "")
    elif event.kind == "quarantine":
        shown = reasons.quarantined(shown)
    often = "" if event.kind == "round" else f"{event.times:,} times "  # rounds are named in the text
    again = f' <span class="quiet">{often}since {clock(event.first)}</span>' if event.times > 1 else ""
    return escape(shown) + again


def subject(event: Event) -> str:
    """A link to the device, run or release; of several devices to one of them."""
    if event.kind in DEVICES:
        more = f' <span class="quiet">and {event.subjects - 1:,} more</span>' if event.subjects > 1 else ""
        return device_link(event.subject) + more
    return (
        run_link(event.subject) if event.kind in RUNS else f'<a href="/releases">{escape(event.subject)}</a>'
    )


COLUMNS = (
    PageColumn("Time, UTC", "at", clock),
    PageColumn("Level", "level", word),
    PageColumn("Kind", "kind"),
    PageColumn("Subject", "subject", cell=subject),
    PageColumn("Text", "text", cell=text),
)
NOTE = empty("No events", "Runs, rounds, releases, rejections and failures are listed here.")


def build(board: PageBoard, address: Address) -> None:
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
