"""Numbers, shares, sizes, durations and times as text, for the terminal, the dashboard and reports."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from html import escape as _escape
from math import isfinite
from typing import TypeGuard

from edge_fl.errors import InputError, shortened

NOTHING = "-"
MOST_DEVIATIONS = 100
"""Standard deviations above which a drift is no longer a figure."""
MAX_CELL, MAX_PROSE = 120, 400
"""Characters of a device's text in a list: of a name, and of prose, which holds every explanation of a failure word."""
SHOWN = 3  # names
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(count: int, noun: str) -> str:
    """1 device, 2 devices."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def few(devices: Collection[str]) -> str:
    """The number of devices and the first names: 50 devices (pi-01, pi-02, pi-03 and 47 more)."""
    names = sorted(devices)
    return f"{counted(len(names), 'device')} ({shortened(names, SHOWN)})"


def percent(share: float | None) -> str:
    """Format an accuracy or another share: 0.923 -> "92.3 %"; "-" for None and NaN."""
    return f"{100 * share:.1f} %" if _is_known(share) else NOTHING


def points(difference: float | None) -> str:
    """Format a difference between two shares: 0.021 -> "+2.1 points"; "-" for None and NaN."""
    return f"{_signed(difference, 1)} points" if _is_known(difference) else NOTHING


def difference(
    mean: float | None, low: float | None, high: float | None, digits: int = 1
) -> tuple[str, str, str]:
    """Format a difference between two shares and the ends of its interval in percentage points: "+2.1", "+0.7", "+3.5".

    All have the decimals that the interval needs: no end of one that excludes 0 is shown as 0.
    """
    ends = [100 * end for end in (low, high) if _is_known(end)]
    if len(ends) == 2 and (min(ends) > 0 or max(ends) < 0):
        while not all(round(end, digits) for end in ends):
            digits += 1
    first, second, third = (
        _signed(value, digits) if _is_known(value) else NOTHING for value in (mean, low, high)
    )
    return first, second, third


def deviations(value: float) -> str:
    """Format a number of standard deviations: "2.5", "more than 100"."""
    return f"{value:.1f}" if value <= MOST_DEVIATIONS else f"more than {MOST_DEVIATIONS}"


def size(bytes: float | None) -> str:
    """Format bytes: 1536 -> "1.5 KiB"; "-" for None."""
    if bytes is None:
        return NOTHING
    value, unit = float(bytes), 0
    while value >= 1024 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {UNITS[unit]}"


def seconds(value: float | None, digits: int = 1) -> str:
    """Format a duration: "0.4 s", "3 min", "2.5 h"; "-" for None and NaN. `digits` applies to seconds."""
    if not _is_known(value):
        return NOTHING
    if value < 100:
        return f"{value:.{digits}f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"


DURATIONS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


def parse_duration(text: str, option: str) -> float:
    """Parse "90", "90s", "15min", "2h" or "3d" into seconds. Raises InputError that names the option."""
    number = text.rstrip("smindh")
    unit = text[len(number) :].strip() or "s"
    try:
        value = float(number) * DURATIONS[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 <= value <= 1e9:
        raise InputError(f"{option} {text!r}: expected a duration such as 90s, 15min, 2h or 3d")
    return value


def parse_moment(text: str, option: str, now: datetime | None = None) -> datetime:
    """Parse a day or time in UTC ("2026-11-23", "2026-11-23T14:00", "today", "yesterday"), or an age ("2h", "7d").

    Raises InputError that names the option.
    """
    now = now or datetime.now(UTC)
    if text in (days := {"today": 0, "yesterday": 1}):
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight - timedelta(days=days[text])
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except ValueError:
        pass
    try:
        return now - timedelta(seconds=parse_duration(text, option))
    except InputError as error:
        expected = "a day or time in UTC, such as 2026-11-23, 2026-11-23T14:00 or yesterday, or an age such as 2h or 7d"
        raise InputError(f"{option} {text!r}: expected {expected}") from error


def cut(text: str, most: int = MAX_CELL) -> str:
    """A text of a device for a list: its first characters, with "..." if there are more; JSON and the device's page have all."""
    return text if len(text) <= most else text[: most - 3] + "..."


def cut_prose(text: str) -> str:
    """Like `cut`, for prose."""
    return cut(text, MAX_PROSE)


def escape(text: object) -> str:
    """Text for HTML, between tags and in quoted attributes."""
    return _escape(str(text), quote=True)


def number(value: int | float | None) -> str:
    """12345 -> "12,345"; a dash for None."""
    return f"{value:,.0f}" if _is_known(value) else NOTHING


def positive(value: int) -> str:
    """Like `number`, with a dash for 0."""
    return number(value or None)


def share(value: float | None, digits: int = 1) -> str:
    """0.9312 -> "93.1"; per cent without the sign."""
    return f"{100 * value:.{digits}f}" if _is_known(value) else NOTHING


def mean(value: float | None, n: int) -> str:
    """0.9312 of 12 clients -> "93.1 (n = 12)"; markup."""
    text = share(value)
    return text if text == NOTHING else f'{text} <span class="quiet">(n = {number(n) if n else "?"})</span>'


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


def _signed(difference: float, digits: int) -> str:
    return f"{round(100 * difference, digits) + 0.0:+.{digits}f}"


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)
