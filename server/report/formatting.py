"""Numbers, times and sizes as people read them, the same in the dashboard and in reports. Pure: the time now is an argument."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape as _escape
from math import isfinite

from edge_fl.console import units

NOTHING = "–"


def escape(text: object) -> str:
    """Text that may stand in HTML, between tags and in quoted attributes."""
    return _escape(str(text), quote=True)


def number(value: int | float | None) -> str:
    """12,345; a dash where there is none."""
    if value is None or not isfinite(value):
        return NOTHING
    return f"{value:,.0f}"


def share(value: float | None, digits: int = 1) -> str:
    """0.9312 -> "93.1"; a share in per cent, without the sign: its column says so."""
    if value is None or not isfinite(value):
        return NOTHING
    return f"{100 * value:.{digits}f}"


def size(bytes: int | float | None) -> str:
    """1536 -> "1.5 KiB"."""
    return NOTHING if bytes is None else units.size(bytes)


def seconds(value: float | None) -> str:
    """Of any length: "0.4 s", "3 min", "2.5 h"."""
    return NOTHING if value is None or not isfinite(value) else units.seconds(value)


def ago(moment: str, now: datetime) -> str:
    """How long ago an ISO time was, coarse enough to stay the same for a while: "now", "40 s", "12 min", "3 h", "5 d"."""
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return NOTHING
    passed = (now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
    if passed < 60:
        return f"{int(passed // 10) * 10} s" if passed >= 10 else "now"
    for limit, unit, name in ((3600, 60, "min"), (172_800, 3600, "h")):
        if passed < limit:
            return f"{int(passed // unit)} {name}"
    return f"{int(passed // 86400)} d"


def since(moment: str, now: datetime) -> str:
    """`ago` as it stands alone: "now", "40 s ago"."""
    passed = ago(moment, now)
    return passed if passed in ("now", NOTHING) else f"{passed} ago"


def clock(moment: str) -> str:
    """An ISO time as "2026-11-20 14:03:59", UTC."""
    return moment[:19].replace("T", " ") or NOTHING
