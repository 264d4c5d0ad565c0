"""How far a comparison is: a line per finished cell with what is left of the time, beside the bars of `edge_fl.console.progress`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from edge_fl import metrics
from edge_fl.console import progress, units
from edge_fl.console.progress import Count
from server.compare.cell import Measured
from server.compare.grid import Cell


class Progress:
    """Of a comparison whose `todo` is run `jobs` cells at a time, after `kept` others were found already run."""

    def __init__(self, todo: Sequence[Cell], kept: int, jobs: int) -> None:
        self._todo = {cell.key: cell for cell in todo}
        self._kept, self._jobs, self._total = kept, jobs, len(todo)
        self._seconds: dict[str, list[float]] = {}
        self.watch = progress.Progress()

    def __enter__(self) -> Self:
        self.watch.__enter__()
        self.watch.print(f"{self._total} cells to run, {self._kept} kept from before")
        self.watch(Count("cells", 0, self._total))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.__exit__(kind, error, trace)

    def done(self, measured: Measured) -> None:
        """One cell has ended, well or not."""
        cell = self._todo.pop(measured.key)
        if not measured.failure:
            self._seconds.setdefault(cell.label, []).append(measured.seconds)
        ended = self._total - len(self._todo)
        left = f"; {in_words(self.seconds_left())} left" if self._todo else ""
        self.watch.print(f"[{ended}/{self._total}] {cell}: {_result(measured)}{left}")
        self.watch(Count("cells", ended, self._total))

    def seconds_left(self) -> float:
        """What the remaining cells take: each as long as its method took so far, or as long as the others did."""
        known = [seconds for every in self._seconds.values() for seconds in every]
        if not known:
            return float("nan")
        usual = sum(known) / len(known)
        each = (self._seconds.get(cell.label, [usual]) for cell in self._todo.values())
        return sum(sum(seconds) / len(seconds) for seconds in each) / min(self._jobs, max(len(self._todo), 1))


def in_words(seconds: float) -> str:
    """A duration as a person says it: "about 40 s", "about 12 min", "about 3.5 h"."""
    return "unknown time" if seconds != seconds else f"about {units.seconds(seconds, 0)}"


def _result(measured: Measured) -> str:
    if measured.failure:
        return f"FAILED, {measured.failure}"
    known = next((n for n in (metrics.PERSONAL_AFTER, metrics.GLOBAL_TEST) if n in measured.last), None)
    accuracy = f"{known} {measured.last[known].mean:.3f}" if known else "no accuracy"
    return f"{accuracy} in {measured.seconds:.1f} s"
