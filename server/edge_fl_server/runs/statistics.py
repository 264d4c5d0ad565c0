"""Which means may be compared: each has its number of clients n, and a round counts only if enough clients measured it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan

from edge_fl import metrics
from edge_fl.metrics import Summary

LEAST_SHARE = 0.5
"""Share of the largest n of a curve from which its points are compared; fewer clients may be just the good ones."""
VALIDATION = (metrics.PERSONAL_VALIDATION_BEFORE, metrics.GLOBAL_VALIDATION)


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
    largest = largest_n(measured)
    return metrics.best_round(
        [found.mean if found and is_enough(found.clients, largest) else nan for found in measured]
    )


def largest_n(summaries: Iterable[Summary | None]) -> int:
    """The largest number of clients; 0 without any."""
    return max((found.clients for found in summaries if found), default=0)
