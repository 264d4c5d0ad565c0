"""What several pages are made of: words with a colour, tables, lists of facts, empty states."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from urllib.parse import urlencode

from server.report import svg
from server.report.formatting import NOTHING, escape

TONES = {
    "ready": "good",
    "running": "good",
    "completed": "good",
    "succeeded": "good",
    "lost": "bad",
    "failed": "bad",
    "error": "bad",
    "aborted": "bad",
    "rejected": "bad",
    "alert": "warn",
    "paused": "warn",
    "warning": "warn",
    "timed_out": "warn",
    "rolled_back": "warn",
    "budget_exhausted": "warn",
    "stopped": "hollow",
    "sleeping": "hollow",
    "disconnected": "hollow",
}
"""How a word looks; all others are grey."""
TEXTS = frozenset({"Reason", "Detail", "Error", "Text"})
"""Columns of sentences, by their headings."""


def word(text: str, shown: str = "") -> str:
    """A state, with its colour."""
    return f'<span class="word {TONES.get(text, "")}">{escape(shown or text.replace("_", " "))}</span>'


def empty(title: str, text: str, command: str = "") -> str:
    """What stands where there is nothing yet, and what to do about it."""
    shown = f"<pre><code>{escape(command)}</code></pre>" if command else ""
    return f'<div class="sheet empty"><h2>{escape(title)}</h2><p>{escape(text)}</p>{shown}</div>'


def facts(found: Mapping[str, str], *, big: bool = False) -> str:
    """Names and values, both already HTML."""
    size = ' class="big"' if big else ""
    items = "".join(
        f"<div><dt>{name}</dt><dd{size}>{value or NOTHING}</dd></div>" for name, value in found.items()
    )
    return f'<dl class="facts">{items}</dl>'


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Container[str] = (),
    *,
    named: bool = True,
) -> str:
    """Cells that are HTML already. The columns of these headings stand to the right, those of TEXTS may wrap.

    On a narrow window the first column stays in sight if it names its row (`named`).
    """
    kinds = [
        ' class="n"' if heading in numbers else ' class="wide"' if heading in TEXTS else ""
        for heading in headings
    ]
    head = "".join(
        f'<th scope="col"{kind}>{heading}</th>' for kind, heading in zip(kinds, headings, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="sheet{" named" if named else ""}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def plot(series: Sequence[svg.Series], *, height: int = 260, label: str, step: str = "round") -> str:
    """Curves and their legend, on a sheet; nothing without any point."""
    if not any(one.points for one in series):
        return ""
    drawn = svg.fitting(lambda width: svg.curves(series, width=width, height=height, label=label, step=step))
    return f'<div class="sheet padded plot">{drawn}{svg.legend(series)}</div>'


def pager(page: int, pages: int, found: int, per_page: int, go: Mapping[int, str], what: str) -> str:
    """Which part of a list is shown, and the way to the next; `go` maps a page to the address that shows it."""
    if not found:
        return ""
    first, last = page * per_page + 1, min((page + 1) * per_page, found)
    buttons = "".join(
        f'<button data-key="{key}" data-go="{escape(go.get(to, ""))}"{"" if 0 <= to < pages else " disabled"}>{label}</button>'
        for key, to, label in (("previous", page - 1, "‹ Previous"), ("next", page + 1, "Next ›"))
    )
    buttons = buttons if pages > 1 else ""
    return f'<div class="pager"><span>{first:,}–{last:,} of {found:,} {what}</span><span class="to">{buttons}</span></div>'


def query(values: Mapping[str, object]) -> str:
    """The part of an address that says what is not as usual."""
    shown = {
        name: int(value) if isinstance(value, bool) else value for name, value in values.items() if value
    }
    return urlencode(shown)


def device_link(device: str) -> str:
    """A device's name, which leads to its page."""
    name = escape(device)
    return f'<a class="name" href="/device/{name}" title="{name}" data-key="to-{name}">{name}</a>'
