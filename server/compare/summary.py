"""A comparison summed up: one row per method, dataset and partition, every number as mean and std over the seeds.

A number's name is its metric's; behind it ".weighted_mean", ".std" and ".bottom_decile" say how clients were summed up (nothing: the
plain mean), ".participants" that only clients that took part count, ".best_by_validation" that it is not of the last round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.metrics import Summary
from server.compare.cell import Measured, Point
from server.compare.grid import Cell, blocks

METRICS = (
    metrics.GLOBAL_TEST,
    metrics.PERSONAL_BEFORE,
    metrics.PERSONAL_AFTER,
    metrics.UNSEEN_TEST,
    metrics.EPSILON,
)
STATISTICS = ("weighted_mean", "std", "bottom_decile")
BYTES_DOWN, BYTES_UP = "bytes_down_per_round", "bytes_up_per_round"
UNTIL_BYTES, UNTIL_ROUNDS = "bytes_until_target", "rounds_until_target"
SECONDS, BEST_ROUND = "seconds", "best_round"


class MeanStd(Struct, frozen=True):
    """Mean and std (population, as np.std) of a number over the `count` seeds that have it."""

    mean: float
    std: float
    count: int


class Row(Struct, frozen=True):
    """A method on one dataset and partition. `failures` names the seeds that gave no number, and why."""

    method: str
    dataset: str
    partition: str
    seeds: list[int]
    numbers: dict[str, MeanStd]
    failures: dict[int, str]
    keys: list[str]


def rows(cells: Sequence[Cell], found: Mapping[str, Measured], target: float | None = None) -> list[Row]:
    """One row per method and block, in the order of `cells`; cells that are not in `found` are left out."""
    table = []
    for (dataset, partition), inside in blocks(cells):
        alone = {cell.recipe.seed: _local(found.get(cell.key)) for cell in inside if cell.label == "local"}
        for label in dict.fromkeys(cell.label for cell in inside):
            measured = [found[c.key] for c in inside if c.label == label and c.key in found]
            if measured:
                table.append(_row(label, dataset, partition, measured, alone, target))
    return table


def numbers(measured: Measured, target: float | None = None) -> dict[str, float]:
    """Every number of one cell by its name."""
    found: dict[str, float] = {}
    for name in METRICS:
        if summary := measured.last.get(name):
            found |= dict(_statistics(name, summary))
        if summary := measured.participants.get(name):
            found[f"{name}.{metrics.PARTICIPANTS}"] = summary.mean
        if summary := measured.best.get(name):
            found |= dict(_statistics(metrics.at_best_round(name), summary))
    if measured.best_round:
        found[BEST_ROUND] = measured.best_round
    return {**found, **_traffic(measured, target), SECONDS: measured.seconds}


def mean_std(values: Iterable[float]) -> MeanStd:
    """Mean and std over seeds."""
    every = np.array([value for value in values if math.isfinite(value)], np.float64)
    return (
        MeanStd(float(every.mean()), float(every.std()), len(every))
        if len(every)
        else MeanStd(math.nan, math.nan, 0)
    )


def _row(
    label: str,
    dataset: str,
    partition: str,
    measured: Sequence[Measured],
    alone: Mapping[int, float],
    target: float | None,
) -> Row:
    whole = [one for one in measured if not one.failure]
    each = [
        {**numbers(one, target), metrics.LOCAL_ONLY: alone.get(one.recipe.seed, math.nan)} for one in whole
    ]
    names = dict.fromkeys(name for found in each for name in found)
    return Row(
        label,
        dataset,
        partition,
        [one.recipe.seed for one in whole],
        {name: mean_std(found[name] for found in each if name in found) for name in names},
        {one.recipe.seed: one.failure for one in measured if one.failure},
        [one.key for one in whole],
    )


def _statistics(name: str, summary: Summary) -> Iterator[tuple[str, float]]:
    yield name, summary.mean
    for statistic in STATISTICS:
        yield f"{name}.{statistic}", getattr(summary, statistic)


def _local(measured: Measured | None) -> float:
    """What the clients reach alone, from the cell of Local."""
    if measured is None or metrics.PERSONAL_AFTER not in measured.last:
        return math.nan
    return measured.last[metrics.PERSONAL_AFTER].mean


def _traffic(measured: Measured, target: float | None) -> dict[str, float]:
    curve = measured.curve
    if not curve:
        return {}
    found: dict[str, float] = {
        BYTES_DOWN: sum(point.bytes_down for point in curve) / len(curve),
        BYTES_UP: sum(point.bytes_up for point in curve) / len(curve),
    }
    if target is not None and (rounds := _until(measured, target)):
        sent = [point.bytes_down + point.bytes_up for point in curve[:rounds]]
        per_client = [total / max(point.clients, 1) for total, point in zip(sent, curve, strict=False)]
        found |= {UNTIL_ROUNDS: rounds, UNTIL_BYTES: sum(sent), f"{UNTIL_BYTES}.per_client": sum(per_client)}
    return found


def _until(measured: Measured, target: float) -> int:
    """The first round whose models reach the target on average over clients, by what each method predicts with; 0: none did.

    What only the closing step brings has cost every round.
    """
    for position, point in enumerate(measured.curve):
        if _reached(point, target):
            return position + 1
    after = measured.last.get(metrics.PERSONAL_AFTER)
    return len(measured.curve) if after and after.mean >= target else 0


def _reached(point: Point, target: float) -> bool:
    return any(
        point.means.get(name, 0.0) >= target for name in (metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST)
    )
