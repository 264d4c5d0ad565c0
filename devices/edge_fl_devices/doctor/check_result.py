"""Result of one check of the doctor: a state, what was found, and a remedy unless the state is ok."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """One checked item, its state, what was found, and what to do about it."""

    check: str
    state: State
    found: str
    remedy: str = ""


def result(check: str, passed: bool, found: str, remedy: str) -> CheckResult:
    """Return "ok" or "failed"."""
    return CheckResult(check, "ok", found) if passed else CheckResult(check, "failed", found, remedy)


def graded(check: str, value: int, least: int, enough: int, found: str, remedy: str) -> CheckResult:
    """Return "ok" from `enough` on, "failed" below `least`, and "warning" in between."""
    if value >= enough:
        return CheckResult(check, "ok", found)
    return CheckResult(check, "failed" if value < least else "warning", found, remedy)
