"""What happened, the newest first."""

from __future__ import annotations

from collections.abc import Sequence

from server.dashboard.pages.parts import device_link, empty, table, word
from server.dashboard.queries.log import LEVELS, Event
from server.report.formatting import clock, escape

OF_DEVICES = frozenset({"refused", "run_id", "quarantine"})
OF_RUNS = frozenset({"run", "round"})


def filters(level: str) -> str:
    """Levels to choose from."""
    chips = "".join(
        f'<button data-key="level-{name}" data-go="{f"level={name}" if name != "all" else ""}"'
        f' aria-pressed="{str((level or "all") == name).lower()}">{name}</button>'
        for name in ("all", *LEVELS)
    )
    return f'<div class="chips" role="group" aria-label="Show only">{chips}</div>'


def body(events: Sequence[Event]) -> str:
    """The events of the chosen level."""
    if not events:
        return empty("Nothing has happened", "Runs, rounds, releases, refusals and failures are listed here.")
    rows = (
        (
            clock(event.at),
            word(event.level),
            escape(event.kind),
            _subject(event),
            escape(
                event.text.strip(": ").replace("timed_out", "timed out").replace("rolled_back", "rolled back")
            ),
        )
        for event in events
    )
    return table(("Time, UTC", "Level", "What", "Of", "Text"), rows, named=False)


def _subject(event: Event) -> str:
    if event.kind in OF_DEVICES:
        return device_link(event.subject)
    name = escape(event.subject)
    if event.kind in OF_RUNS:
        return f'<a href="/run/{name}" data-key="to-{name}">{name}</a>'
    return f'<a href="/releases">{name}</a>'
