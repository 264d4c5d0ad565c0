"""Summary of a comparison: one row per method, dataset and partition, every number as mean and standard deviation over seeds.

A number is named after its metric. A suffix states the statistic over clients (".weighted_mean", ".std", ".bottom_decile"; none: the plain
mean), ".participants" restricts it to clients that took part, ".best_by_validation" is the best round instead of the last.

Methods are compared on the same clients and seeds. With three seeds or more the interval of the difference is Student's t over the seeds'
mean differences: each seed draws a new split and new initial weights, so their spread contains that of clients and that of seeds. With
fewer seeds it is over the clients' differences in these seeds only.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.metrics import Summary
from edge_fl_lab.compare.cell_runs import CellResult, Point
from edge_fl_lab.compare.grid import ALWAYS, Cell, blocks
from edge_fl_server.runs.summaries import differences

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
MIN_SEEDS = 3  # for an interval over seeds


class MeanStd(Struct, frozen=True):
    """Mean and population standard deviation over the `count` seeds that have the number."""

    mean: float
    std: float
    count: int


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


class MethodRow(Struct, frozen=True):
    """A method on one dataset and partition.

    `validation` is the mean validation accuracy over seeds (-1 without results), `by_client` the accuracy after the final personalisation
    by seed and client. `failures` maps failed seeds to the reason, `differences` the other methods of ALWAYS to this one's gain over them.
    """

    method: str
    dataset: str
    partition: str
    numbers: dict[str, MeanStd]
    validation: float
    by_client: dict[int, dict[str, float]]
    keys: dict[int, str]
    failures: dict[int, str]
    differences: dict[str, PairedDifference] = {}

    @property
    def block(self) -> tuple[str, str]:
        """(dataset, partition)."""
        return self.dataset, self.partition

    @property
    def clients(self) -> int:
        """The number of pairs of client and seed."""
        return sum(map(len, self.by_client.values()))

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
        of_methods: dict[str, list[CellResult]] = {}
        for cell in block:
            if cell.key in results:
                of_methods.setdefault(cell.label, []).append(results[cell.key])
        local = {result.recipe.seed: _local(result) for result in of_methods.get("local", [])}
        found = [_row(label, *where, each, local, target) for label, each in of_methods.items()]
        baselines = [row for label in ALWAYS for row in found if row.method == label]
        for row in found:
            gains = {
                other.method: gain
                for other in baselines
                if row is not other and (gain := difference(other.method, other.by_client, row.by_client))
            }
            table.append(msgspec.structs.replace(row, differences=gains))
    return table


def baselines(rows: Iterable[MethodRow]) -> list[str]:
    """The methods of ALWAYS that any of the rows is compared with."""
    found = {label for row in rows for label in row.differences}
    return [label for label in ALWAYS if label in found]


def difference(
    baseline: str, theirs: Mapping[int, Mapping[str, float]], ours: Mapping[int, Mapping[str, float]]
) -> PairedDifference | None:
    """Compare the accuracies of two methods by seed and client; None without a common client. The ends are NaN for a single pair."""
    pairs = {
        seed: found
        for seed in sorted(theirs.keys() & ours.keys())
        if (found := differences(theirs[seed], ours[seed]))
    }
    if not pairs:
        return None
    means = {seed: float(np.mean(list(found.values()))) for seed, found in pairs.items()}
    every = [value for found in pairs.values() for value in found.values()]
    over_seeds = len(pairs) >= MIN_SEEDS
    chosen = list(means.values()) if over_seeds else every
    low, high = metrics.interval(chosen)
    over: Literal["seeds", "clients"] = "seeds" if over_seeds else "clients"
    return PairedDifference(baseline, float(np.mean(chosen)), low, high, over, len(pairs), len(every), means)


def by_client(result: CellResult) -> dict[str, float]:
    """Each client's accuracy after the final personalisation."""
    found = {
        client: report.get(metrics.PERSONAL_AFTER, math.nan) for client, report in result.clients.items()
    }
    return {client: value for client, value in found.items() if math.isfinite(value)}


def validation(result: CellResult) -> float | None:
    """The mean validation accuracy over clients that methods and trials are chosen by; None for a failed cell."""
    found = result.last.get(metrics.PERSONAL_VALIDATION_AFTER)
    return None if result.failure or found is None or math.isnan(found.mean) else found.mean


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
    rounds = [(point.round, _both(point.means, point.weighted)) for point in result.curve]
    last = _both(
        *({name: getattr(each, of) for name, each in result.last.items()} for of in ("mean", "weighted_mean"))
    )
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
            **means,
        }


def _both(means: Mapping[str, float], weighted: Mapping[str, float]) -> dict[str, float]:
    """The accuracies among the means over clients, and the same weighted by test samples."""
    found = {name: mean for name, mean in means.items() if metrics.ACCURACY in name}
    return {**found, **{f"{name}.weighted_mean": weighted[name] for name in found if name in weighted}}


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
    scores = [validation(result) or 0.0 for result in complete]
    return MethodRow(
        label,
        dataset,
        partition,
        numbers={name: mean_std(each[name] for each in by_seed if name in each) for name in names},
        validation=float(np.mean(scores)) if scores else -1.0,
        by_client={result.recipe.seed: by_client(result) for result in complete},
        keys={result.recipe.seed: result.key for result in complete},
        failures={result.recipe.seed: result.failure for result in results if result.failure},
    )


def _statistics(name: str, summary: Summary) -> Iterator[tuple[str, float]]:
    yield name, summary.mean
    for statistic in STATISTICS:
        yield f"{name}.{statistic}", getattr(summary, statistic)


def _local(result: CellResult) -> float:
    """Accuracy of the clients without any sharing."""
    if metrics.PERSONAL_AFTER not in result.last:
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
