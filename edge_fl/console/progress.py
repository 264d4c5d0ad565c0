"""Progress of a long job on stderr: bars on a terminal, occasional lines elsewhere, nothing under `--quiet`.

A job reports each stage's progress to a `Watch`. The caller passes a `Progress`, which computes speed and remaining time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from edge_fl import logs
from edge_fl.console import units
from edge_fl.console.output import is_quiet, print_status

EVERY_S = 10.0


class Count(NamedTuple):
    """Progress of one stage: `done` of `of` rounds, clients, heads or bytes. A smaller `done` than before restarts the stage."""

    stage: str
    done: int
    of: int
    bytes: bool = False

    @property
    def over(self) -> bool:
        return self.done >= self.of


Watch = Callable[[Count], None]


def unwatched(count: Count) -> None:
    """A `Watch` that ignores progress."""


@dataclass
class Pace:
    """Speed of a stage since it began, on the monotonic clock."""

    first: int
    began_s: float
    printed_s: float
    done: int = 0
    bar: Any = None

    def rate(self, count: Count, now_s: float) -> float:
        """Units per second; 0 before the first one."""
        return (count.done - self.first) / max(now_s - self.began_s, 0.1)

    def left_s(self, count: Count, now_s: float) -> float | None:
        """Remaining seconds; None before the first unit is done."""
        rate = self.rate(count, now_s)
        return (count.of - count.done) / rate if rate > 0 else None


class Progress:
    """Display the stages of one job; itself a `Watch`. `live` draws bars; by default on a terminal, unless logs are JSON."""

    def __init__(self, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        live = sys.stderr.isatty() if live is None else live
        self._live = live and not is_quiet() and not logs.is_json()
        self._clock, self._lock = clock, threading.Lock()
        self._paces: dict[str, Pace] = {}
        self._bars: Any = None

    def __enter__(self) -> Self:
        if self._live:
            self._bars = _bars()
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        bars, self._bars = self._bars, None
        if bars:
            bars.stop()

    def print(self, line: str) -> None:
        """Print one line above the bars."""
        if bars := self._bars:
            bars.console.print(line, markup=False, highlight=False)
        else:
            print_status(line)

    def __call__(self, count: Count) -> None:
        """Report progress; may be called from any thread."""
        with self._lock:
            now_s = self._clock()
            pace = self._paces.get(count.stage)
            if pace is None or count.done < pace.done:
                pace = self._begin(count, now_s, pace)
            pace.done = count.done
            if bars := self._bars:
                bars.update(pace.bar, completed=count.done, total=count.of, text=text(count, pace, now_s))
            elif now_s - pace.printed_s >= EVERY_S and not count.over:
                pace.printed_s = now_s
                left_s = pace.left_s(count, now_s)
                left = f", about {units.seconds(left_s, 0)} left" if left_s is not None else ""
                print_status(f"{count.stage}: {text(count, pace, now_s)}{left}")
            if count.over:
                self._end(count.stage)

    def _begin(self, count: Count, now_s: float, before: Pace | None) -> Pace:
        if before:
            self._end(count.stage)
        bar = self._bars.add_task(count.stage, total=count.of, text="") if self._bars else None
        self._paces[count.stage] = pace = Pace(count.done, now_s, now_s, bar=bar)
        return pace

    def _end(self, stage: str) -> None:
        pace = self._paces.pop(stage)
        if self._bars and pace.bar is not None:
            self._bars.remove_task(pace.bar)


def text(count: Count, pace: Pace, now_s: float) -> str:
    """Format count and speed: "40 of 100, 3.2/s", "1.5 of 4.0 MiB", "7 of 20, 2.4/min"."""
    rate = pace.rate(count, now_s)
    if count.bytes:
        amount, speed = f"{units.size(count.done)} of {units.size(count.of)}", f"{units.size(rate)}/s"
    else:
        amount = f"{count.done:,} of {count.of:,}"
        speed = f"{rate:.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min"
    return f"{amount}, {speed}" if rate else amount


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=Console(stderr=True), transient=True)
