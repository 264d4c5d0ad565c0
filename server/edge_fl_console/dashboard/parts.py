"""Markup that several pages share: states with a colour, lists of facts, table columns, empty states, links."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from operator import attrgetter
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct

from edge_fl.console.units import (
    NOTHING,
    ago,
    clock,
    cut,
    cut_prose,
    deviations,
    difference,
    escape,
    mean,
    number,
    positive,
    seconds,
    share,
    size,
)
from edge_fl.untrusted import whole
from edge_fl_server.registry.fleets import Presence
from edge_fl_server.runs.summaries import Paired

TONES = {
    "good": "ready running completed succeeded online",
    "bad": "lost failed error aborted rejected",
    "warn": "alert paused warning timed_out rolled_back budget_exhausted offline",
    "hollow": "stopped sleeping disconnected replaced",
}
TONE = {state: tone for tone, states in TONES.items() for state in states.split()}
"""Colour of a state; all others are grey."""


def cut_text(text: object) -> str:
    """A text for a row, cut and escaped: a device may have sent it."""
    return escape(cut_prose(str(text)))


def sigmas(value: float) -> str:
    """Drift in standard deviations; a dash for none."""
    return f'<span class="text-warn">{deviations(value)} σ</span>' if value else NOTHING


def decimal(value: float | None) -> str:
    """Three significant digits; a dash for None."""
    return NOTHING if value is None else f"{value:.3g}"


def outlier(score: float) -> str:
    """Outlier score of a device; a dash for 0, coloured from 1 on."""
    text = decimal(score or None)
    return f'<span class="text-bad">{text}</span>' if score >= 1 else text


LONG = 22  # characters of a name, beyond which it is wrapped
MAX_PAGE = 10**8
"""The highest number of a page of rows."""
NUMERIC = frozenset({number, positive, share, size, seconds, ago, sigmas, decimal, outlier})
"""Formats of columns that are aligned right."""
TOGGLE = "toggle-color=chosen toggle-text-color=chosen"
"""Properties of toggles whose look comes from the style sheet."""
WRAPPED = frozenset({"Reason", "Detail", "Error", "Text", "Message"})
"""Labels of columns that wrap."""


class PageColumn(Struct, frozen=True):
    """A column of a table: its label, the attribute of a row that it shows, and its format as markup.

    `cell` draws the cell from the whole row instead; `markup` then only says how it is aligned. A `minor` column is left out on a phone,
    and one that `wraps` becomes narrow where the table is too wide.
    """

    label: str
    name: str
    markup: Callable[[Any], str] = cut_text
    sortable: bool = False
    cell: Callable[[Any], str] | None = None
    minor: bool = False
    wraps: bool = False

    def draw(self, row: Any) -> str:
        return self.cell(row) if self.cell else self.markup(attrgetter(self.name)(row))

    @property
    def options(self) -> dict[str, Any]:
        """Quasar's description of the column."""
        right = self.markup in NUMERIC
        return {
            "name": self.name,
            "label": self.label,
            "field": self.name,
            "align": "right" if right and self.label not in WRAPPED else "left",
            "classes": " ".join(
                name
                for name, has in (
                    ("wide", self.label in WRAPPED),
                    ("wraps", self.wraps),
                    ("minor", self.minor),
                )
                if has
            ),
            "headerClasses": "minor" if self.minor else "",
            "sortable": self.sortable,
            "sortOrder": "da" if self.falling else "ad",
        }

    @property
    def falling(self) -> bool:
        """Whether the first click sorts from the largest: numbers do, but accuracies begin with the worst."""
        return self.markup in NUMERIC and self.markup not in (ago, share)


def cells(columns: Sequence[PageColumn], rows: Iterable[Any]) -> list[dict[str, Any]]:
    """The rows of a table for Quasar: their number as "id", and markup by column."""
    return [{"id": id} | {one.name: one.draw(row) for one in columns} for id, row in enumerate(rows)]


def place(value: object) -> int:
    """The number of a page that a browser sent, from 0; 0 for anything else."""
    if isinstance(value, str):
        return whole(value, MAX_PAGE) or 0
    return value if type(value) is int and 0 <= value <= MAX_PAGE else 0


def word(text: str) -> str:
    """A state, with its colour."""
    return f'<span class="word {TONE.get(text, "")}">{escape(text.replace("_", " "))}</span>'


def server_state(presence: Presence) -> str:
    """Whether a server is online, and since when."""
    if not presence.since:
        return word("no server yet")
    state = word("online" if presence.online else "offline")
    return f'server {state} <span class="quiet">since {clock(presence.since)[:16]} UTC</span>'


def heading(title: str, rest: str = "") -> str:
    """The page's title, followed by markup."""
    return f'<div class="head"><h1>{escape(title)}</h1>{rest}</div>'


def button(action: str, target: object, label: str, look: str = "") -> str:
    """A button that starts an action after confirmation; `action` and `target` are its key."""
    act = escape(f"{action}:{target}")
    return f'<button class="{look}" data-act="{act}" data-key="{act}">{escape(label)}</button>'


def empty(title: str, text: str, command: str = "") -> str:
    """The empty state of a page, with a command that fills it."""
    shown = f"<pre><code>{escape(command)}</code></pre>" if command else ""
    return f'<div class="sheet empty"><h2>{escape(title)}</h2><p>{escape(text)}</p>{shown}</div>'


def facts(values: Mapping[str, str], *, big: bool = True) -> str:
    """Names and values on a sheet; values are markup."""
    size = ' class="big"' if big else ""
    items = "".join(
        f"<div><dt>{name}</dt><dd{size}>{value or NOTHING}</dd></div>" for name, value in values.items()
    )
    return f'<div class="sheet padded"><dl class="facts">{items}</dl></div>'


def gain(found: Paired | None) -> str:
    """A mean difference with its interval and n: "+2.1 points (95 % CI +0.7 to +3.5, n = 12)"; a dash without one."""
    if found is None:
        return NOTHING
    mean, low, high = difference(found.mean, found.low, found.high)
    interval = "" if isnan(found.low) else f"95 % CI {low} to {high}, "
    return f'{mean} points <span class="quiet">({interval}n = {number(found.n)})</span>'


def means(found: Paired | None) -> str:
    """Both means of the same devices in per cent: "93.5 → 96.0 (n = 12)"; a dash without any."""
    return f"{share(found.before)} → {mean(found.after, found.n)}" if found else NOTHING


def meaning(found: Paired) -> str:
    """Whether a difference is more than chance."""
    return found.meaning


def tags(given: Mapping[str, str]) -> str:
    """The tags of a device, each a link to the devices that have it; nothing without any."""
    links = (
        f'<a class="tag{_wrapped(text)}" href="/fleet?{urlencode({"where": text})}">{escape(text)}</a>'
        for text in (f"{key}={value}" for key, value in given.items())
    )
    return f'<div class="tags">{"".join(links)}</div>' if given else ""


def version(text: str | None) -> str:
    """A version of software; a dash for none."""
    return f'<span class="version{_wrapped(text)}">{escape(cut(text))}</span>' if text else NOTHING


def device_link(device: str) -> str:
    """A link to a device's page."""
    return _link("/device/", device)


def run_link(run: str) -> str:
    """A link to a run's page."""
    return _link("/run/", run)


def _link(path: str, name: str) -> str:
    text = escape(name)
    return f'<a class="name{_wrapped(name)}" href="{path}{text}" data-key="to-{text}">{text}</a>'


def _wrapped(text: str) -> str:
    """The class of a text that is wrapped, since a column cannot be as wide."""
    return " long" if len(text) > LONG else ""
