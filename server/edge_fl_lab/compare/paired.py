"""Paired differences between two methods on the same clients and seeds, with a confidence interval.

With three seeds or more the interval is Student's t over the seeds' mean differences. Each seed draws a new split and new initial weights,
so their spread contains that of clients and that of seeds. With fewer seeds it is over the clients' differences in these seeds only.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import ALWAYS, Cell
from edge_fl_server.runs.summaries import differences

MIN_SEEDS = 3


class PairedDifference(Struct, frozen=True):
    """Mean accuracy of a method minus that of `baseline`, with its interval over `seeds` or over the `pairs` of clients."""

    baseline: str
    mean: float
    low: float
    high: float
    over: Literal["seeds", "clients"]
    seeds: int
    pairs: int
    by_seed: dict[int, float]


def difference(
    baseline: str, theirs: Mapping[int, CellResult], ours: Mapping[int, CellResult]
) -> PairedDifference | None:
    """Compare the results of two methods by seed; None without a common client. The ends are NaN for a single pair."""
    pairs = {
        seed: found
        for seed in sorted(theirs.keys() & ours.keys())
        if (found := differences(by_client(theirs[seed]), by_client(ours[seed])))
    }
    if not pairs:
        return None
    means = {seed: float(np.mean(list(found.values()))) for seed, found in pairs.items()}
    every = [value for found in pairs.values() for value in found.values()]
    over_seeds = len(pairs) >= MIN_SEEDS
    low, high = metrics.interval(list(means.values()) if over_seeds else every)
    mean = float(np.mean(list(means.values()) if over_seeds else every))
    over: Literal["seeds", "clients"] = "seeds" if over_seeds else "clients"
    return PairedDifference(baseline, mean, low, high, over, len(pairs), len(every), means)


def text(found: PairedDifference) -> str:
    """Format in percentage points: "+1.20 [-0.31, +2.71]"."""
    ends = "" if math.isnan(found.low) else f" [{found.low * 100:+.2f}, {found.high * 100:+.2f}]"
    return f"{found.mean * 100:+.2f}{ends}"


def meaning(found: PairedDifference, ours: str, note: str = "") -> str:
    """Explain a column of differences of `ours` in one note."""
    pairs = f"{found.pairs} pairs of client and seed"
    spread = f"{found.seeds} seeds, {pairs}" if found.over == "seeds" else pairs
    return (
        f"difference: {ours}, minus {found.baseline} (the baseline with the best validation accuracy{note}) on the same"
        f" clients, in percentage points, with the 95 % confidence interval over {spread}"
    )


def record(found: PairedDifference) -> dict[str, object]:
    """Flatten for CSV."""
    names = ("baseline", "mean", "low", "high", "over", "seeds", "pairs")
    return {f"difference.{name}": getattr(found, name) for name in names}


def by_client(result: CellResult) -> dict[str, float]:
    """Each client's accuracy after the final personalisation."""
    found = {
        client: report.get(metrics.PERSONAL_AFTER, math.nan) for client, report in result.clients.items()
    }
    return {client: value for client, value in found.items() if math.isfinite(value)}


def of_method(
    label: str, block: tuple[str, str], cells: Sequence[Cell], results: Mapping[str, CellResult]
) -> dict[int, CellResult]:
    """The complete results of a method by seed."""
    return {
        cell.recipe.seed: found
        for cell in cells
        if cell.label == label
        and cell.block == block
        and (found := results.get(cell.key))
        and not found.failure
    }


def validation(result: CellResult) -> float | None:
    """The mean validation accuracy over clients that methods and trials are chosen by; None for a failed cell."""
    found = result.last.get(metrics.PERSONAL_VALIDATION_AFTER)
    return None if result.failure or found is None or math.isnan(found.mean) else found.mean


def score(found: Mapping[int, CellResult]) -> float:
    """Mean validation accuracy over seeds, -1 without results."""
    values = [validation(result) or 0.0 for result in found.values()]
    return float(np.mean(values)) if values else -1.0


def best_baseline(block: tuple[str, str], cells: Sequence[Cell], results: Mapping[str, CellResult]) -> str:
    """The one of ALWAYS with the highest validation accuracy."""
    return max(ALWAYS, key=lambda label: score(of_method(label, block, cells, results)))
