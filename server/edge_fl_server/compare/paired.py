"""Paired differences between two methods on the same clients and seeds, with a confidence interval.

With three seeds or more the interval is Student's t over the seeds' mean differences. Each seed draws a new split and new initial weights,
so their spread contains that of clients and that of seeds. With fewer seeds it is over the clients' differences in these seeds only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl_server.compare.cell import CellResult
from edge_fl_server.runs.statistics import differences

MIN_SEEDS = 3


class Difference(Struct, frozen=True):
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
) -> Difference | None:
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
    return Difference(baseline, mean, low, high, over, len(pairs), len(every), means)


def by_client(result: CellResult) -> dict[str, float]:
    """Each client's accuracy after the final personalisation."""
    found = {
        client: report.get(metrics.PERSONAL_AFTER, math.nan) for client, report in result.clients.items()
    }
    return {client: value for client, value in found.items() if math.isfinite(value)}
