"""Progress of a long job on stderr: bars on a terminal, occasional lines elsewhere, nothing under `--quiet`.

A job reports each stage's progress to a `Watch`. The caller passes a `Progress`, which computes speed and remaining time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from edge_fl import logs
from edge_fl.console import units
from edge_fl.console.output import is_quiet, print_status

EVERY_S = 10.0
RECENT_S, MARK_S = 10.0, 1.0
LATE_S, LATE = 5.0, 0.5
"""An estimate is missed when the stage would end later than it said, by these seconds and this share of its whole time."""


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
    """Speed of a stage in the later half of its time, and in RECENT_S at least: the first units are often slower."""

    began_s: float
    printed_s: float
    marks: deque[tuple[float, int]]
    done: int = 0
    bar: Any = None
    promised_s: float | None = None  # when the first estimate that was shown says that the stage ends
    missed: bool = False

    def note(self, count: Count, now_s: float) -> None:
        """Add a count that has grown, at most one per second."""
        if count.done > self.marks[-1][1] and now_s - self.marks[-1][0] >= MARK_S:
            self.marks.append((now_s, count.done))
        since_s = now_s - max(RECENT_S, (now_s - self.began_s) / 2)
        while len(self.marks) > 2 and self.marks[0][0] < since_s:
            self.marks.popleft()
        self.done = count.done

    def rate(self, count: Count, now_s: float) -> float:
        """Units per second; 0 before the first one."""
        at_s, done = self.marks[0]
        return (count.done - done) / max(now_s - at_s, 0.1)

    def left_s(self, count: Count, now_s: float) -> float | None:
        """Remaining seconds; None before the first unit is done, and once the end has moved far beyond the first estimate.

        Such a stage waits for something whose pace its past does not tell, such as devices: its next estimate would be wrong as well.
        """
        rate = self.rate(count, now_s)
        if rate <= 0 or self.missed:
            return None
        left_s = (count.of - count.done) / rate
        if self.promised_s is None:
            self.promised_s = now_s + left_s
        self.missed = now_s + left_s - self.promised_s > LATE_S + LATE * (self.promised_s - self.began_s)
        return None if self.missed else left_s


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
            pace.note(count, now_s)
            if bars := self._bars:
                bars.update(pace.bar, completed=count.done, total=count.of, text=text(count, pace, now_s))
            elif now_s - pace.printed_s >= EVERY_S and not count.over:
                pace.printed_s = now_s
                print_status(f"{count.stage}: {text(count, pace, now_s)}")
            if count.over:
                self._end(count.stage)

    def _begin(self, count: Count, now_s: float, before: Pace | None) -> Pace:
        if before:
            self._end(count.stage)
        bar = self._bars.add_task(count.stage, total=count.of, text="") if self._bars else None
        self._paces[count.stage] = pace = Pace(now_s, now_s, deque([(now_s, count.done)]), bar=bar)
        return pace

    def _end(self, stage: str) -> None:
        pace = self._paces.pop(stage)
        if self._bars and pace.bar is not None:
            self._bars.remove_task(pace.bar)


def text(count: Count, pace: Pace, now_s: float) -> str:
    """Format count, speed and time left: "40 of 100, 3.2/s, about 19 s left", "7 of 20, 2.4/min, about 5 min left".

    Without an estimate it is what is known: "7 of 20", and after a missed estimate "7 of 20, for 5 min".
    """
    rate = pace.rate(count, now_s)
    if count.bytes:
        amount, speed = f"{units.size(count.done)} of {units.size(count.of)}", f"{units.size(rate)}/s"
    else:
        amount = f"{count.done:,} of {count.of:,}"
        speed = f"{rate:.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min"
    left_s = pace.left_s(count, now_s)
    if pace.missed:
        return f"{amount}, for {units.seconds(now_s - pace.began_s, 0)}"
    return amount if left_s is None else f"{amount}, {speed}, about {units.seconds(left_s, 0)} left"


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
    )
    return Bars(*columns, console=Console(stderr=True), transient=True)
