"""How far a comparison is: a line per finished cell with what is left of the time, and on a terminal a bar below them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from edge_fl import metrics
from edge_fl.cli import is_quiet, say
from server.compare.cell import Measured
from server.compare.grid import Cell


class Progress:
    """Of a comparison whose `todo` is run `jobs` cells at a time, after `kept` others were found already run."""

    def __init__(self, todo: Sequence[Cell], kept: int, jobs: int) -> None:
        self._todo = {cell.key: cell for cell in todo}
        self._kept, self._jobs = kept, jobs
        self._seconds: dict[str, list[float]] = {}
        self._bar: Any = None

    def __enter__(self) -> Self:
        self._started, self._total = time.monotonic(), len(self._todo)
        say(f"{self._total} cells to run, {self._kept} kept from before")
        if sys.stderr.isatty() and not is_quiet() and self._todo:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("cells", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def done(self, measured: Measured) -> None:
        """One cell has ended, well or not."""
        cell = self._todo.pop(measured.key)
        if not measured.failure:
            self._seconds.setdefault(cell.label, []).append(measured.seconds)
        place = f"[{self._total - len(self._todo)}/{self._total}]"
        left = f"; {in_words(self.seconds_left())} left" if self._todo else ""
        self._say(f"{place} {cell}: {_result(measured)}{left}")

    def seconds_left(self) -> float:
        """What the remaining cells take: each as long as its method took so far, or as long as the others did."""
        known = [seconds for every in self._seconds.values() for seconds in every]
        if not known:
            return float("nan")
        usual = sum(known) / len(known)
        each = (self._seconds.get(cell.label, [usual]) for cell in self._todo.values())
        return sum(sum(seconds) / len(seconds) for seconds in each) / min(self._jobs, max(len(self._todo), 1))

    def _say(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
            self._bar.update(self._task, completed=self._total - len(self._todo))
        else:
            say(line)


def in_words(seconds: float) -> str:
    """A duration as a person says it: "about 40 s", "about 12 min", "about 3.5 h"."""
    if seconds != seconds:
        return "unknown time"
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"


def _result(measured: Measured) -> str:
    if measured.failure:
        return f"FAILED, {measured.failure}"
    known = next((n for n in (metrics.PERSONAL_AFTER, metrics.GLOBAL_TEST) if n in measured.last), None)
    accuracy = f"{known} {measured.last[known].mean:.3f}" if known else "no accuracy"
    return f"{accuracy} in {measured.seconds:.1f} s"
