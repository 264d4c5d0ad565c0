"""What the doctor says of one thing: how it is, and, unless that is well, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at, what was found, and, unless that is well, what to do."""

    check: str
    state: State
    found: str
    remedy: str = ""


def finding(check: str, good: bool, found: str, remedy: str) -> Finding:
    """Ok or failed."""
    return Finding(check, "ok", found) if good else Finding(check, "failed", found, remedy)


def graded(check: str, value: int, least: int, enough: int, found: str, remedy: str) -> Finding:
    """Ok from `enough` on, failed below `least`, a warning in between."""
    if value >= enough:
        return Finding(check, "ok", found)
    return Finding(check, "failed" if value < least else "warning", found, remedy)
