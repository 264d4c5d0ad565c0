"""Daily usage of the device and its budgets: bytes, processor seconds, and energy (an estimate).

    FOLDER/usage.json     the day's totals, so that they survive a restart (a power cut loses what was not saved yet)

Beyond a budget the agent fetches, fits and trains nothing until the next day; serving and pending reports continue. The day is that of
the wall clock.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.fleet.remote_settings import Budget
from edge_fl_devices.storage import read_json, write_json

FILE = "usage.json"
SAVE_EVERY_S, SAVE_EVERY_BYTES = 600.0, 4_000_000  # writes wear out SD cards


class Usage(Struct, frozen=True):
    """Totals of one day; `bytes` are payloads in both directions, `watts` the power of a busy core."""

    day: str = ""
    bytes: int = 0
    cpu_s: float = 0.0
    watts: float = Budget().watts

    @property
    def energy_kj(self) -> float:
        return self.cpu_s * self.watts / 1000

    @property
    def numbers(self) -> dict[str, float]:
        """The totals as report metrics."""
        return {
            metrics.USED_BYTES: float(self.bytes),
            metrics.USED_CPU: self.cpu_s,
            metrics.USED_ENERGY: self.energy_kj,
        }


def exceeded(usage: Usage, budget: Budget) -> str:
    """Name the exhausted budget; "" if there is none."""
    for name, used, limit, unit in (
        ("bytes", usage.bytes / 1e6, budget.megabytes, "MB"),
        ("processor", usage.cpu_s, budget.cpu_s, "s"),
        ("energy (estimate)", usage.energy_kj, budget.kilojoules, "kJ"),
    ):
        if limit and used >= limit:
            return f"budget: {name} {used:.1f} of {limit:g} {unit} today"
    return ""


def today() -> str:
    """Return the current UTC date."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def read(folder: Path) -> Usage:
    """Return the stored totals, zero without a file."""
    return read_json(folder / FILE, Usage) or Usage()


class Meter:
    """Accumulates the usage of this process and its children; `total_bytes` returns the payload bytes since the start."""

    def __init__(
        self,
        folder: Path,
        total_bytes: Callable[[], int],
        today: Callable[[], str] = today,
        cpu_s: Callable[[], float] = lambda: _cpu_s(),
        *,
        watts: float = Budget().watts,
    ) -> None:
        self._folder, self._today, self._watts = folder, today, watts
        self._total_bytes, self._cpu_s = total_bytes, cpu_s
        self._usage = read(folder)
        self._bytes_before, self._cpu_before = total_bytes(), 0.0
        self._save_at_s, self._saved = -math.inf, Usage()

    def update(self, *, last: bool = False) -> Usage:
        """Return the day's totals, saved to disk every SAVE_EVERY_S or SAVE_EVERY_BYTES, and if this is the `last` call before the end."""
        sent, cpu_s, day = self._total_bytes(), self._cpu_s(), self._today()
        before = self._usage if self._usage.day == day else Usage(day)
        self._usage = replace(
            before,
            bytes=before.bytes + sent - self._bytes_before,
            cpu_s=before.cpu_s + cpu_s - self._cpu_before,
            watts=self._watts,
        )
        self._bytes_before, self._cpu_before = sent, cpu_s
        more = self._usage.bytes - self._saved.bytes
        if not last and time.monotonic() < self._save_at_s and more < SAVE_EVERY_BYTES:
            return self._usage
        self._save_at_s, self._saved = time.monotonic() + SAVE_EVERY_S, self._usage
        with suppress(OSError):  # disk full: keep counting in memory
            write_json(self._folder / FILE, self._usage)
        return self._usage


def _cpu_s() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
