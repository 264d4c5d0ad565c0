"""Numbers, shares, sizes and durations for the terminal, the dashboard and reports."""

from collections.abc import Collection
from math import isfinite

from edge_fl.errors import InputError, shortened

NOTHING = "-"
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
    return f"{100 * share:.1f} %" if share is not None and isfinite(share) else NOTHING


def points(difference: float | None) -> str:
    """Format a difference between two shares: 0.021 -> "+2.1 points"; "-" for None and NaN."""
    if difference is None or not isfinite(difference):
        return NOTHING
    return f"{round(100 * difference, 1) + 0.0:+.1f} points"


def size(bytes: float | None) -> str:
    """Format bytes: 1536 -> "1.5 KiB"; "-" for None."""
    if bytes is None:
        return NOTHING
    value, unit = float(bytes), 0
    while value >= 1024 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {UNITS[unit]}"


def seconds(value: float, digits: int = 1) -> str:
    """Format a duration: "0.4 s", "3 min", "2.5 h"; `digits` applies to seconds."""
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
