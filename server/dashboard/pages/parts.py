"""Markup that several pages share: states with a colour, lists of facts, table columns, empty states, links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct

from server.report.formatting import NOTHING, escape

TONES = {
    "good": "ready running completed succeeded",
    "bad": "lost failed error aborted rejected",
    "warn": "alert paused warning timed_out rolled_back budget_exhausted",
    "hollow": "stopped sleeping disconnected",
}
TONE = {state: tone for tone, states in TONES.items() for state in states.split()}
"""Colour of a state; all others are grey."""
TEXTS = frozenset({"Reason", "Detail", "Error", "Text"})
"""Headings of columns that wrap."""


class Column(Struct, frozen=True):
    """A column of a table. Columns of numbers are aligned right and sort from the largest value."""

    label: str
    number: bool = False
    sort: str = ""

    @property
    def name(self) -> str:
        return self.sort or self.label

    @property
    def options(self) -> dict[str, Any]:
        """Quasar's description of the column."""
        return {
            "name": self.name,
            "label": self.label,
            "field": self.name,
            "align": "right" if self.number else "left",
            "classes": "wide" if self.label in TEXTS else "",
            "sortable": bool(self.sort),
            "sortOrder": "da" if self.number and self.sort != "seen" else "ad",
        }


def columns(labels: Sequence[str], numbers: Collection[str] = ()) -> tuple[Column, ...]:
    """Columns that do not sort; `numbers` are the labels of those with numbers."""
    return tuple(Column(label, label in numbers) for label in labels)


def word(text: str) -> str:
    """A state, with its colour."""
    return f'<span class="word {TONE.get(text, "")}">{escape(text.replace("_", " "))}</span>'


def heading(title: str, rest: str = "") -> str:
    """The page's title, followed by markup."""
    return f'<div class="head"><h1>{escape(title)}</h1>{rest}</div>'


def button(action: str, target: object, label: str, look: str = "") -> str:
    """A button that starts an action after confirmation; `action` and `target` are its key."""
    act = escape(f"{action}:{target}")
    return f'<button class="{look}" data-act="{act}">{escape(label)}</button>'


def empty(title: str, text: str, command: str = "") -> str:
    """The empty state of a page, with a command that fills it."""
    shown = f"<pre><code>{escape(command)}</code></pre>" if command else ""
    return f'<div class="sheet empty"><h2>{escape(title)}</h2><p>{escape(text)}</p>{shown}</div>'


def facts(values: Mapping[str, str], *, big: bool = False) -> str:
    """Names and values on a sheet; values are markup."""
    size = ' class="big"' if big else ""
    items = "".join(
        f"<div><dt>{name}</dt><dd{size}>{value or NOTHING}</dd></div>" for name, value in values.items()
    )
    return f'<div class="sheet padded"><dl class="facts">{items}</dl></div>'


def link(path: str, name: str) -> str:
    """A link to the page of a device or run, or to another page."""
    text = escape(name)
    return f'<a class="name" href="{path}{text}" title="{text}" data-key="to-{text}">{text}</a>'


def bars(counts: Sequence[int]) -> str:
    """Samples by class as small bars, for a table cell."""
    if not any(counts):
        return ""
    text = f"{sum(counts):,} samples in {sum(map(bool, counts))} of {len(counts)} classes"
    drawn = "".join(f'<i style="height:{max(8, 100 * n / max(counts)) if n else 0:.0f}%"></i>' for n in counts)
    return f'<span class="bars" role="img" aria-label="{text}" title="{text}">{drawn}</span>'
