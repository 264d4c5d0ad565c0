"""What a person sees of a long job while it goes on: bars on a terminal, now and then a line elsewhere, nothing under `--quiet`.

A job knows nothing of this. It tells a `Watch` how far each of its stages is, and whoever started it hands in a `Progress`, which works
out how fast that is and how much time is left. Everything goes to stderr: stdout is for results.
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
    """How far one stage of a job is: `done` of `of` rounds, clients, heads, or bytes. One that falls back begins anew."""

    stage: str
    done: int
    of: int
    bytes: bool = False

    @property
    def over(self) -> bool:
        return self.done >= self.of


Watch = Callable[[Count], None]


def unwatched(count: Count) -> None:
    """Nobody looks."""


@dataclass
class Pace:
    """A stage since it began, on the monotonic clock: `rate` per second, `left_s` seconds to its end."""

    first: int
    began_s: float
    told_s: float
    done: int = 0
    bar: Any = None

    def rate(self, count: Count, now_s: float) -> float:
        """0 while nothing was done."""
        return (count.done - self.first) / max(now_s - self.began_s, 0.1)

    def left_s(self, count: Count, now_s: float) -> float | None:
        """None while nothing was done, so that nobody knows."""
        rate = self.rate(count, now_s)
        return (count.of - count.done) / rate if rate > 0 else None


class Progress:
    """Shows the stages of one job; itself a `Watch`. `live` draws bars: by default on a terminal, where people read it."""

    def __init__(self, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        wanted = sys.stderr.isatty() if live is None else live
        self._live = wanted and not is_quiet() and not logs.is_json()
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
        """One line that stays."""
        if bars := self._bars:
            bars.console.print(line, markup=False, highlight=False)
        else:
            print_status(line)

    def __call__(self, count: Count) -> None:
        """Any thread may tell."""
        with self._lock:
            now_s = self._clock()
            pace = self._paces.get(count.stage)
            if pace is None or count.done < pace.done:
                pace = self._begin(count, now_s, pace)
            pace.done = count.done
            if bars := self._bars:
                bars.update(pace.bar, completed=count.done, total=count.of, said=said(count, pace, now_s))
            elif now_s - pace.told_s >= EVERY_S and not count.over:
                pace.told_s = now_s
                left_s = pace.left_s(count, now_s)
                left = f", about {units.seconds(left_s, 0)} left" if left_s is not None else ""
                print_status(f"{count.stage}: {said(count, pace, now_s)}{left}")
            if count.over:
                self._end(count.stage)

    def _begin(self, count: Count, now_s: float, before: Pace | None) -> Pace:
        if before:
            self._end(count.stage)
        bar = self._bars.add_task(count.stage, total=count.of, said="") if self._bars else None
        self._paces[count.stage] = pace = Pace(count.done, now_s, now_s, bar=bar)
        return pace

    def _end(self, stage: str) -> None:
        pace = self._paces.pop(stage)
        if self._bars and pace.bar is not None:
            self._bars.remove_task(pace.bar)


def said(count: Count, pace: Pace, now_s: float) -> str:
    """How far and how fast: "40 of 100, 3.2/s", "1.5 of 4.0 MiB", "7 of 20, 2.4/min"."""
    rate = pace.rate(count, now_s)
    if count.bytes:
        far = f"{units.size(count.done)} of {units.size(count.of)}"
        return f"{far}, {units.size(rate)}/s" if rate else far
    far = f"{count.done:,} of {count.of:,}"
    if not rate:
        return far
    return f"{far}, {rate:.1f}/s" if rate >= 1 else f"{far}, {60 * rate:.1f}/min"


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[said]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=Console(stderr=True), transient=True)
