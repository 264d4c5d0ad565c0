"""Results of the comparison, as JSON and as a markdown table."""

import statistics
from collections.abc import Iterator

from msgspec import Struct

from tools.bench import table
from tools.bench.measure import MEGABYTE, Machine

OURS = "edge-fl"
TOLERANCE = 1e-5
COLUMNS = (
    "method",
    "side",
    "s per round",
    "ratio to edge-fl (turns)",
    "first round after",
    "peak memory",
    "weights differ by",
)


class Result(Struct, frozen=True):
    """One side of a case. `seconds`: of each turn; `first_s`: from start to the end of round 1; `peak`: bytes (PSS) of all its processes;
    `difference`: of the weights from edge-fl's after round 1. `error`: why it was not measured.
    """

    side: str
    about: dict[str, str] = {}
    seconds: list[float] = []
    first_s: float = 0.0
    peak: int = 0
    difference: float | None = None
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def name(self) -> str:
        """The side with its version and setting."""
        version, setting = self.about.get("version", ""), self.about.get("setting", "")
        return ", ".join(filter(None, (f"{self.side} {version}".strip(), setting)))


class Compared(Struct, frozen=True):
    """All sides of a case. `steps`: optimiser steps of one epoch over all clients; `tolerance`: of the weights."""

    title: str
    clients: int
    steps: int
    results: list[Result]
    tolerance: float = TOLERANCE

    @property
    def ours(self) -> Result:
        return next(result for result in self.results if result.side == OURS)

    def ratios(self, result: Result) -> list[float]:
        """How much longer a side takes than edge-fl, turn by turn."""
        return [theirs / ours for theirs, ours in zip(result.seconds, self.ours.seconds, strict=True)]

    def shown(self) -> list[Result]:
        """The results without the slower settings of the same side."""
        best: dict[str, Result] = {}
        for result in self.results:
            known = best.get(result.side)
            if known is None or known.error or (not result.error and result.median < known.median):
                best[result.side] = result
        return list(best.values())


class Report(Struct, frozen=True):
    """The machine and all cases."""

    machine: Machine
    cases: list[Compared]


def markdown(report: Report) -> str:
    """The report as a markdown table."""
    lines = [table.heading(report.machine), "", _line(COLUMNS), "|" + "---|" * len(COLUMNS)]
    lines += [_line(row) for case in report.cases for row in rows(case)]
    return "\n".join(lines) + "\n"


def rows(case: Compared) -> Iterator[tuple[str, ...]]:
    """The table's rows of a case; a side with other weights shows no ratio."""
    what = f"{case.title} ({case.clients} clients, {case.steps} steps an epoch)"
    for position, result in enumerate(case.shown()):
        title = what if position == 0 else ""
        if result.error:
            yield title, result.name, f"failed: {result.error}", "", "", "", ""
            continue
        yield (
            title,
            result.name,
            f"{result.median:.3g} ({min(result.seconds):.3g} to {max(result.seconds):.3g})",
            _ratio(case, result),
            f"{result.first_s:.1f} s",
            f"{result.peak / MEGABYTE:,.0f} MB",
            "" if result.difference is None else f"{result.difference:.1e}",
        )


def _ratio(case: Compared, result: Result) -> str:
    if result.side == OURS:
        return ""
    if case.ours.error:
        return "edge-fl failed"
    if result.difference is None or not result.difference <= case.tolerance:
        return "not comparable"
    ratios = case.ratios(result)
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
