"""Progress of a comparison: a line per finished cell with the estimated time left, and the bars of `edge_fl.console.progress`."""

from collections.abc import Sequence
from statistics import fmean
from typing import Self

from edge_fl import metrics
from edge_fl.console import progress, units
from edge_fl.console.progress import Count
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell


class CellProgress(progress.Progress):
    """Show the progress of the cells in `todo`, run `jobs` at a time; `kept` cells have stored results."""

    def __init__(self, todo: Sequence[Cell], kept: int, jobs: int) -> None:
        super().__init__()
        self._todo = {cell.key: cell for cell in todo}
        self._kept, self._jobs, self._total = kept, jobs, len(todo)
        self._seconds: dict[str, list[float]] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        self.print(f"{self._total} cells to run, {self._kept} already done")
        self(Count("cells", 0, self._total))
        return self

    def done(self, result: CellResult) -> None:
        """Report a finished or failed cell."""
        cell = self._todo.pop(result.key)
        if not result.failure:
            self._seconds.setdefault(cell.label, []).append(result.seconds)
        ended = self._total - len(self._todo)
        left = f"; {about(self.seconds_left())} left" if self._todo else ""
        self.print(f"[{ended}/{self._total}] {cell}: {_result(result)}{left}")
        self(Count("cells", ended, self._total))

    def seconds_left(self) -> float:
        """Estimate the remaining time from the mean duration of each method, or of all methods for one without a finished cell."""
        known = [seconds for of_method in self._seconds.values() for seconds in of_method]
        if not known:
            return float("nan")
        estimates = (fmean(self._seconds.get(cell.label, known)) for cell in self._todo.values())
        return sum(estimates) / min(self._jobs, max(len(self._todo), 1))


def about(seconds: float) -> str:
    """Format an estimated duration: "about 40 s", "about 12 min", "about 3.5 h"."""
    return "unknown time" if seconds != seconds else f"about {units.seconds(seconds, 0)}"


def _result(result: CellResult) -> str:
    if result.failure:
        return f"FAILED, {result.failure}"
    metric = next(
        (name for name in (metrics.PERSONAL_AFTER, metrics.GLOBAL_TEST) if name in result.last), None
    )
    accuracy = f"{metric} {units.percent(result.last[metric].mean)}" if metric else "no accuracy"
    return f"{accuracy} in {result.seconds:.1f} s"
