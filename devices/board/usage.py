"""What the device used today, and its budgets: bytes, processor seconds, and energy, which is an estimate and says so.

    FOLDER/usage.json     the day's sums, so that a restart does not start the day anew

Beyond a budget the agent fetches, fits and trains nothing until the next day; what it serves and what it has still to report go on. The day
is the wall clock's: a board that does not know the date counts until it does.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.errors import EdgeFLError
from edge_fl.files import atomic

FILE = "usage.json"
KEEP_EVERY_S = 600.0  # cards wear
Amount = Annotated[float, Meta(ge=0)]


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """Per day; 0 is no limit. `watts` is what one busy core draws: energy is processor seconds times that, nothing is measured."""

    megabytes: Amount = 0.0
    cpu_s: Amount = 0.0
    kilojoules: Amount = 0.0
    watts: Amount = 2.5


class Usage(Struct, frozen=True):
    """One day's sums; `bytes` are payloads in both directions, `watts` is what a busy core draws."""

    day: str = ""
    bytes: int = 0
    cpu_s: float = 0.0
    watts: float = Budget().watts

    @property
    def energy_kj(self) -> float:
        """An estimate."""
        return self.cpu_s * self.watts / 1000

    @property
    def numbers(self) -> dict[str, float]:
        """As a report tells them."""
        return {
            metrics.USED_BYTES: float(self.bytes),
            metrics.USED_CPU: self.cpu_s,
            metrics.USED_ENERGY: self.energy_kj,
        }


def exceeded(usage: Usage, budget: Budget) -> str:
    """Which budget is used up, in words; "" if none is."""
    for name, used, limit, unit in (
        ("bytes", usage.bytes / 1e6, budget.megabytes, "MB"),
        ("processor", usage.cpu_s, budget.cpu_s, "s"),
        ("energy (estimate)", usage.energy_kj, budget.kilojoules, "kJ"),
    ):
        if limit and used >= limit:
            return f"budget: {name} {used:.1f} of {limit:g} {unit} today"
    return ""


def today() -> str:
    """The day that is counted, by the wall clock."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def read(folder: Path) -> Usage:
    """The sums kept; none if there are none."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Usage)
    except (OSError, msgspec.DecodeError):
        return Usage()


class Meter:
    """Adds up what this process and its children use; `total_bytes` says how much has gone over the wire since the start."""

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
        self._keep_at_s = -math.inf

    def update(self) -> Usage:
        """The day's sums now, kept on the disk every so often."""
        sent, cpu_s, day = self._total_bytes(), self._cpu_s(), self._today()
        before = self._usage if self._usage.day == day else Usage(day)
        self._usage = replace(
            before,
            bytes=before.bytes + sent - self._bytes_before,
            cpu_s=before.cpu_s + cpu_s - self._cpu_before,
            watts=self._watts,
        )
        self._bytes_before, self._cpu_before = sent, cpu_s
        if time.monotonic() < self._keep_at_s:
            return self._usage
        self._keep_at_s = time.monotonic() + KEEP_EVERY_S
        try:
            atomic.write(self._folder / FILE, msgspec.json.encode(self._usage))
        except (OSError, EdgeFLError):
            pass  # a full disk: counted on in memory
        return self._usage


def _cpu_s() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
