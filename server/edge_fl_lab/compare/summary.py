"""Summary of a comparison: one row per method, dataset and partition, every number as mean and standard deviation over seeds.

A number is named after its metric. A suffix states the statistic over clients (".weighted_mean", ".std", ".bottom_decile"; none: the plain
mean), ".participants" restricts it to clients that took part, ".best_by_validation" is the best round instead of the last.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.metrics import Summary
from edge_fl_lab.compare import paired
from edge_fl_lab.compare.cell_runs import CellResult, Point
from edge_fl_lab.compare.grid import Cell, blocks
from edge_fl_lab.compare.paired import PairedDifference

METRICS = (
    metrics.GLOBAL_TEST,
    metrics.PERSONAL_LOCAL,
    metrics.PERSONAL_BEFORE,
    metrics.PERSONAL_AFTER,
    metrics.UNSEEN_TEST,
    metrics.UNSEEN_AFTER,
    metrics.EPSILON,
)
STATISTICS = ("weighted_mean", "std", "bottom_decile")
BYTES_DOWN, BYTES_UP = "bytes_down_per_round", "bytes_up_per_round"
UNTIL_BYTES, UNTIL_ROUNDS = "bytes_until_target", "rounds_until_target"
BYTES, UNTIL_BYTES_EACH = "bytes.per_client", f"{UNTIL_BYTES}.per_client"
DEVICE_SECONDS, UNTIL_SECONDS = "device_seconds", "device_seconds_until_target"
"""Of a client that takes part in every round; processor time of its local updates and, in all, of its final personalisation."""

MEGABYTE = 1e6
FINAL = "final"
"""In place of a round in a learning curve: after the final personalisation."""

SECONDS, BEST_ROUND = "seconds", "best_round"


class MeanStd(Struct, frozen=True):
    """Mean and population standard deviation over the `count` seeds that have the number."""

    mean: float
    std: float
    count: int


class MethodRow(Struct, frozen=True):
    """A method on one dataset and partition, over `clients` pairs of client and seed.

    `failures` maps failed seeds to the reason; `difference` is None for the best baseline.
    """

    method: str
    dataset: str
    partition: str
    seeds: list[int]
    numbers: dict[str, MeanStd]
    failures: dict[int, str]
    keys: list[str]
    clients: int
    difference: PairedDifference | None = None

    @property
    def accuracy(self) -> MeanStd:
        """Accuracy after the final personalisation."""
        return self.numbers.get(metrics.PERSONAL_AFTER) or mean_std([])


def rows(
    cells: Sequence[Cell], results: Mapping[str, CellResult], target: float | None = None
) -> list[MethodRow]:
    """Build one row per method and block, in the order of `cells`; cells without a result are left out."""
    table = []
    for where, block in blocks(cells):
        best = paired.best_baseline(where, block, results)
        baseline = paired.of_method(best, where, block, results)
        local = {cell.recipe.seed: _local(results.get(cell.key)) for cell in block if cell.label == "local"}
        for label in dict.fromkeys(cell.label for cell in block):
            of_method = [results[c.key] for c in block if c.label == label and c.key in results]
            if of_method:
                found = _row(label, *where, of_method, local, target)
                ours = {} if label == best else paired.of_method(label, where, block, results)
                table.append(
                    msgspec.structs.replace(found, difference=paired.difference(best, baseline, ours))
                )
    return table


def numbers(result: CellResult, target: float | None = None) -> dict[str, float]:
    """All numbers of one cell by name."""
    found: dict[str, float] = {}
    for name in (*METRICS, *filter(metrics.head_of, result.last)):
        if summary := result.last.get(name):
            found |= dict(_statistics(name, summary))
        if summary := result.participants.get(name):
            found[f"{name}.{metrics.PARTICIPANTS}"] = summary.mean
        if summary := result.best.get(name):
            found |= dict(_statistics(metrics.at_best_round(name), summary))
    if result.best_round:
        found[BEST_ROUND] = result.best_round
    return {**found, **_traffic(result, target), SECONDS: result.seconds}


def mean_std(values: Iterable[float]) -> MeanStd:
    """Mean and standard deviation of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return MeanStd(math.nan, math.nan, 0)
    return MeanStd(float(np.mean(finite)), float(np.std(finite)), len(finite))


class Cost(Struct, frozen=True):
    """What a client has received, sent and computed so far, if it took part in every round."""

    bytes_down: float = 0.0
    bytes_up: float = 0.0
    device_seconds: float = 0.0


def cumulative(result: CellResult) -> list[Cost]:
    """The cost after each round, and after the final personalisation; its bytes are not counted."""
    costs = [Cost()]
    for point in result.curve:
        before, clients = costs[-1], max(point.clients, 1)
        costs.append(
            Cost(
                before.bytes_down + point.bytes_down / clients,
                before.bytes_up + point.bytes_up / clients,
                before.device_seconds + point.device_seconds,
            )
        )
    last = costs[-1]
    final = msgspec.structs.replace(last, device_seconds=last.device_seconds + result.final_seconds)
    return [*costs[1:], final]


def curve(cell: Cell, result: CellResult) -> Iterator[dict[str, object]]:
    """One record per round, and one after the final personalisation; costs are cumulative and per client."""
    costs = cumulative(result)
    rounds = [(point.round, point.means) for point in result.curve]
    last = {name: summary.mean for name, summary in result.last.items()}
    for (number, means), cost in zip([*rounds, (FINAL, last)] if rounds else [], costs, strict=False):
        yield {
            "method": cell.label,
            "dataset": cell.block[0],
            "partition": cell.block[1],
            "seed": cell.recipe.seed,
            "key": cell.key,
            "round": number,
            "down_mb": cost.bytes_down / MEGABYTE,
            "up_mb": cost.bytes_up / MEGABYTE,
            "device_seconds": cost.device_seconds,
            **{name: mean for name, mean in means.items() if metrics.ACCURACY in name},
        }


def _row(
    label: str,
    dataset: str,
    partition: str,
    results: Sequence[CellResult],
    local: Mapping[int, float],
    target: float | None,
) -> MethodRow:
    complete = [result for result in results if not result.failure]
    by_seed = [
        {**numbers(result, target), metrics.LOCAL_ONLY: local.get(result.recipe.seed, math.nan)}
        for result in complete
    ]
    names = dict.fromkeys(name for each in by_seed for name in each)
    return MethodRow(
        label,
        dataset,
        partition,
        seeds=[result.recipe.seed for result in complete],
        numbers={name: mean_std(each[name] for each in by_seed if name in each) for name in names},
        failures={result.recipe.seed: result.failure for result in results if result.failure},
        keys=[result.key for result in complete],
        clients=sum(len(paired.by_client(result)) for result in complete),
    )


def _statistics(name: str, summary: Summary) -> Iterator[tuple[str, float]]:
    yield name, summary.mean
    for statistic in STATISTICS:
        yield f"{name}.{statistic}", getattr(summary, statistic)


def _local(result: CellResult | None) -> float:
    """Accuracy of the clients without any sharing."""
    if result is None or metrics.PERSONAL_AFTER not in result.last:
        return math.nan
    return result.last[metrics.PERSONAL_AFTER].mean


def _traffic(result: CellResult, target: float | None) -> dict[str, float]:
    curve = result.curve
    if not curve:
        return {}
    costs = cumulative(result)
    found: dict[str, float] = {
        BYTES_DOWN: sum(point.bytes_down for point in curve) / len(curve),
        BYTES_UP: sum(point.bytes_up for point in curve) / len(curve),
        BYTES: costs[-1].bytes_down + costs[-1].bytes_up,
    }
    if costs[-1].device_seconds:
        found[DEVICE_SECONDS] = costs[-1].device_seconds
    place = None if target is None else _until(result, target)
    if place is not None:
        rounds = min(place + 1, len(curve))
        found[UNTIL_ROUNDS] = rounds
        found[UNTIL_BYTES] = sum(point.bytes_down + point.bytes_up for point in curve[:rounds])
        found[UNTIL_BYTES_EACH] = costs[place].bytes_down + costs[place].bytes_up
        if costs[-1].device_seconds:
            found[UNTIL_SECONDS] = costs[place].device_seconds
    return found


def _until(result: CellResult, target: float) -> int | None:
    """The place in `cumulative` of the first models that reach the target on average over clients; None: no models do."""
    for place, point in enumerate(result.curve):
        if _reached(point, target):
            return place
    after = result.last.get(metrics.PERSONAL_AFTER)
    return len(result.curve) if after and after.mean >= target else None


def _reached(point: Point, target: float) -> bool:
    return any(
        point.means.get(name, 0.0) >= target for name in (metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST)
    )
