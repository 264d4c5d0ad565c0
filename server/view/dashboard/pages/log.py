"""What happened, the newest first."""

from __future__ import annotations

from collections.abc import Sequence

from server.view.dashboard.pages.parts import device_link, empty, table, word
from server.view.dashboard.queries.log import LEVELS, Event
from server.view.words import clock, escape

OF_DEVICES = frozenset({"refused", "task", "quarantine"})


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
            device_link(event.subject) if event.kind in OF_DEVICES else escape(event.subject),
            escape(event.text.strip()),
        )
        for event in events
    )
    return table(("Time, UTC", "Level", "What", "Of", "Text"), rows)
