"""Numbers and their honest names: accuracy, recall, and how a value per client is summed up over the fleet.

A name says whose model met whose data: `global.test_acc` is the shared model on every client's own test set, `personal.test_acc.before`
and `.after` the client's own model around personalisation, `local_only.test_acc` a model that never met another client, and
`unseen.test_acc` the shared model, as it is, on clients that never trained. What a method tells of itself beside accuracies is named after
it (`fedcrl.tau_mix`; `Method.measure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

V = TypeVar("V")

GLOBAL_TEST = "global.test_acc"
GLOBAL_VALIDATION = "global.validation_acc"
PERSONAL_BEFORE = "personal.test_acc.before"
PERSONAL_AFTER = "personal.test_acc.after"
PERSONAL_VALIDATION_BEFORE = "personal.validation_acc.before"
PERSONAL_VALIDATION_AFTER = "personal.validation_acc.after"
LOCAL_ONLY = "local_only.test_acc"
UNSEEN_TEST = "unseen.test_acc"
TEST_SAMPLES = "test_samples"
VALIDATION_SAMPLES = "validation_samples"
TEST_LOST = "test_samples.lost"
TEST_GAINED = "test_samples.gained"
"""Test images that were right before and are wrong now, and the other way round."""

LATENCY_BEFORE = "latency_ms.before"
LATENCY_AFTER = "latency_ms.after"
"""Milliseconds that the extractor needs for one image on the device."""

EPSILON = "privacy.epsilon"
"""What a device's updates so far have told of its data at most, in differential privacy's measure."""

USED_BYTES = "used_today.bytes"
USED_CPU = "used_today.cpu_s"
USED_ENERGY = "used_today.kilojoules_estimated"
"""What a device had used that day when it reported: payloads both ways, processor seconds, and an estimate of energy from these."""

COUNTS = frozenset({TEST_SAMPLES, VALIDATION_SAMPLES, TEST_LOST, TEST_GAINED})
"""Names that count samples and are not summed up over the fleet."""

LAST = "last"
BEST_BY_VALIDATION = "best_by_validation"
"""Which round a headline number is from. There is no "best on test"."""

PARTICIPANTS = "participants"
"""Behind a name: the mean is over clients that took part at least once; otherwise it is over all."""


class Summary(Struct, frozen=True, forbid_unknown_fields=True):
    """One value per client, summed up over `clients` of them. `bottom_decile`: see `summarise`. All are NaN when there are none."""

    mean: float
    weighted_mean: float
    std: float
    bottom_decile: float
    clients: int


def accuracy(predicted: NDArray[Any], y: NDArray[Any]) -> float:
    """Share of predictions that are right, 0..1; NaN without samples."""
    return float(np.mean(predicted == y)) if len(y) else float("nan")


def afterwards(found: Mapping[str, float]) -> dict[str, float]:
    """An evaluation that was made when everything was over: what says `before` personalisation is after it."""
    return {name.replace(".before", ".after"): value for name, value in found.items()}


def summarise(values: Sequence[float], weights: Sequence[float] | None = None) -> Summary:
    """Mean, mean weighted by the clients' test samples, std over clients (population), and the bottom decile of one value per client.

    The bottom decile is the mean over the worst tenth of the clients, rounded up to a whole client, so at least one. Clients whose
    value is NaN (no samples) are left out and not counted. Without weights, or when they sum to 0, the weighted mean is the mean.
    """
    every = np.asarray(values, np.float64)
    weight = np.ones_like(every) if weights is None else np.asarray(weights, np.float64)
    if every.shape != weight.shape:
        raise ValueError(f"{len(every)} values, {len(weight)} weights")
    measured = np.isfinite(every)
    every, weight = every[measured], weight[measured]
    if not len(every):
        nan = float("nan")
        return Summary(nan, nan, nan, nan, 0)
    worst = np.sort(every)[: -(-len(every) // 10)]
    weighted = np.average(every, weights=weight) if weight.sum() > 0 else every.mean()
    return Summary(float(every.mean()), float(weighted), float(every.std()), float(worst.mean()), len(every))


def summarise_reports(
    reports: Sequence[Mapping[str, float]], weight: str = TEST_SAMPLES
) -> dict[str, Summary]:
    """A summary per metric over the clients' reports (metric name -> value), each weighted by its own `weight` entry.

    The sample counts themselves are not summed up; a client without the entry weighs nothing in the weighted means.
    """
    names = {name: None for report in reports for name in report if name not in COUNTS}
    summaries = {}
    for name in names:
        having = [report for report in reports if name in report]
        summaries[name] = summarise(
            [report[name] for report in having], [report.get(weight, 0.0) for report in having]
        )
    return summaries


def at_best_round(name: str) -> str:
    """The name of a metric at the best round by validation; a name without this ending is of the last round."""
    return f"{name}.{BEST_BY_VALIDATION}"


def candidate(kind: str) -> str:
    """What a kind of head reached on held-out samples when the head was chosen (`edge_fl.heads.auto`)."""
    return f"auto.{kind}.validation_acc"


def at_labels(labels: int, kind: str) -> str:
    """What a kind of head reaches on held-out samples with so many labels per class."""
    return f"labels_{labels}.{kind}.validation_acc"


def by_labels(found: Mapping[str, V]) -> dict[str, dict[int, V]]:
    """The curves among metrics by name: kind of head -> labels per class -> what `found` has there; the inverse of `at_labels`."""
    curves: dict[str, dict[int, V]] = {}
    for name, value in found.items():
        labels, _, rest = name.removeprefix("labels_").partition(".")
        kind, _, what = rest.partition(".")
        if labels.isdecimal() and what and name == at_labels(int(labels), kind):
            curves.setdefault(kind, {})[int(labels)] = value
    return curves


def best_round(validation: Sequence[float]) -> int | None:
    """Position of the highest validation value, the first of equals; None when nothing was measured (all NaN, or empty)."""
    values = np.asarray(validation, np.float64)
    return int(np.nanargmax(values)) if np.isfinite(values).any() else None
