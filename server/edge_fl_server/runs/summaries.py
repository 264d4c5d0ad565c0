"""Which means may be compared: each has its n, a round counts only if enough clients measured it, and differences are paired."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan, nan, sqrt
from typing import TypeVar

import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.console import units
from edge_fl.metrics import Summary

LEAST_SHARE = 0.5
"""Share of the largest n of a curve from which its points are compared; fewer clients may be just the good ones."""
VALIDATION = (metrics.PERSONAL_VALIDATION_BEFORE, metrics.GLOBAL_VALIDATION)

K = TypeVar("K")


class Paired(Struct, frozen=True):
    """Mean difference of an accuracy (0..1) over the `n` clients that have both values, with its 95 % interval; NaN for one client.

    `before` and `after` are the means of these clients.
    """

    mean: float
    low: float
    high: float
    n: int
    before: float = nan
    after: float = nan

    @property
    def words(self) -> str:
        """The difference with its interval and n: "+2.1 points (95 % CI +0.7 to +3.5, n = 12)"."""
        mean, low, high = units.difference(self.mean, self.low, self.high)
        interval = "" if isnan(self.low) else f"95 % CI {low} to {high}, "
        return f"{mean} points ({interval}n = {self.n:,})"

    @property
    def meaning(self) -> str:
        """Whether the difference is more than chance."""
        if isnan(self.low):
            return "one device: too few to tell from chance"
        if self.low <= 0 <= self.high:
            return "not distinguishable from chance"
        return "better, beyond chance" if self.mean > 0 else "worse, beyond chance"


def paired(before: Mapping[K, float], after: Mapping[K, float]) -> Paired | None:
    """The mean of `after` minus `before` over the clients that both have, with Student's interval; None without a common client."""
    by_client = differences(before, after)
    if not by_client:
        return None
    found = list(by_client.values())
    means = (float(np.mean([values[client] for client in by_client])) for values in (before, after))
    return Paired(float(np.mean(found)), *metrics.interval(found), len(found), *means)


def of_differences(
    n: int, mean: float, mean_square: float, before: float = nan, after: float = nan
) -> Paired | None:
    """As `paired`, from the number, mean and mean square of the differences and both means, as a database sums them."""
    if n < 2:
        return Paired(mean, nan, nan, n, before, after) if n else None
    std = sqrt(max(mean_square - mean**2, 0.0) * n / (n - 1))
    return Paired(mean, *metrics.interval_around(mean, std, n), n, before, after)


def differences(before: Mapping[K, float], after: Mapping[K, float]) -> dict[K, float]:
    """`after` minus `before` of each client with a finite value in both."""
    both = [client for client in before if client in after]
    found = {client: after[client] - before[client] for client in both}
    return {client: value for client, value in found.items() if isfinite(value)}


def is_enough(n: int, largest: int) -> bool:
    """Whether a mean over n clients may be compared with one over `largest`."""
    return n >= LEAST_SHARE * largest


def too_few(clients: Mapping[int, int]) -> frozenset[int]:
    """The rounds, of round -> n, whose means are not comparable with the others."""
    largest = max(clients.values(), default=0)
    return frozenset(round for round, n in clients.items() if not is_enough(n, largest))


def best_by_validation(rounds: Sequence[Mapping[str, Summary]]) -> int | None:
    """The index of the round with the highest mean validation accuracy among those with enough clients; None without validation data."""
    measured = [next((found[name] for name in VALIDATION if name in found), None) for found in rounds]
    largest = max((found.clients for found in measured if found), default=0)
    return metrics.best_round(
        [found.mean if found and is_enough(found.clients, largest) else nan for found in measured]
    )
