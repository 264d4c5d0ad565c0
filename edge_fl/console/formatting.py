"""Numbers, times and sizes as text, the same in the dashboard and in reports."""

from datetime import UTC, datetime
from html import escape as _escape
from math import isfinite

from edge_fl.console import units

NOTHING = "–"


def escape(text: object) -> str:
    """Text for HTML, between tags and in quoted attributes."""
    return _escape(str(text), quote=True)


def number(value: int | float | None) -> str:
    """12345 -> "12,345"; a dash for None."""
    if value is None or not isfinite(value):
        return NOTHING
    return f"{value:,.0f}"


def positive(value: int) -> str:
    """Like `number`, with a dash for 0."""
    return number(value or None)


def share(value: float | None, digits: int = 1) -> str:
    """0.9312 -> "93.1"; per cent without the sign."""
    if value is None or not isfinite(value):
        return NOTHING
    return f"{100 * value:.{digits}f}"


def mean(value: float | None, n: int) -> str:
    """0.9312 of 12 clients -> "93.1 (n = 12)"; markup."""
    text = share(value)
    return text if text == NOTHING else f'{text} <span class="quiet">(n = {number(n) if n else "?"})</span>'


def size(bytes: int | float | None) -> str:
    """1536 -> "1.5 KiB"."""
    return NOTHING if bytes is None else units.size(bytes)


def seconds(value: float | None) -> str:
    """A duration: "0.4 s", "3 min", "2.5 h"."""
    return NOTHING if value is None or not isfinite(value) else units.seconds(value)


def ago(moment: str, now: datetime | None = None) -> str:
    """Age of an ISO time, rounded so that it rarely changes: "now", "40 s", "12 min", "3 h", "5 d"."""
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return NOTHING
    passed = (
        (now or datetime.now(UTC)) - (then if then.tzinfo else then.replace(tzinfo=UTC))
    ).total_seconds()
    if passed < 60:
        return f"{int(passed // 10) * 10} s" if passed >= 10 else "now"
    for limit, unit, name in ((3600, 60, "min"), (172_800, 3600, "h")):
        if passed < limit:
            return f"{int(passed // unit)} {name}"
    return f"{int(passed // 86400)} d"


def since(moment: str, now: datetime | None = None) -> str:
    """Age of an ISO time as a phrase: "now", "40 s ago"."""
    passed = ago(moment, now)
    return passed if passed in ("now", NOTHING) else f"{passed} ago"


def clock(moment: str) -> str:
    """An ISO time as "2026-11-20 14:03:59"."""
    return moment[:19].replace("T", " ") or NOTHING
