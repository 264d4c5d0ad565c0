"""Sizes and durations for the terminal, the dashboard and reports."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(bytes: float) -> str:
    """Format bytes: 1536 -> "1.5 KiB"."""
    value, unit = float(bytes), 0
    while value >= 1024 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {UNITS[unit]}"


def seconds(value: float, digits: int = 1) -> str:
    """Format a duration: "0.4 s", "3 min", "2.5 h"; `digits` applies to seconds."""
    if value < 100:
        return f"{value:.{digits}f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"
