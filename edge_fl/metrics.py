"""Names of metrics, and summaries over the fleet of one value per client.

`global.test_acc`: the shared model on each client's test set; `personal.test_acc.before` and `.after`: the client's own model before and
after final personalisation, `.post_local`: after its local update and before aggregation; `local_only.test_acc`: a model trained on one
client's data only; `unseen.test_acc`: the shared model on clients that never trained, `.served`: the head that they serve as head-only
devices; `head.KIND.test_acc`: a head of this kind fitted on the final extractor; `fleet.test_acc`: the fleet's head alone, on the samples
of `personal.test_acc.after`. A method's own numbers begin with its name (`fedcrl.tau_mix`; `Method.measure`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_fl.fields import MAX_SAMPLES
from edge_fl.untrusted import whole

V = TypeVar("V")

MAX_LABELS = 10**6
CONFIDENCE = 0.95
"""Level of confidence intervals."""

GLOBAL_TEST = "global.test_acc"
GLOBAL_VALIDATION = "global.validation_acc"
PERSONAL_BEFORE = "personal.test_acc.before"
PERSONAL_AFTER = "personal.test_acc.after"
PERSONAL_LOCAL = "personal.test_acc.post_local"
PERSONAL_VALIDATION_LOCAL = "personal.validation_acc.post_local"
LOCAL = (PERSONAL_LOCAL, PERSONAL_VALIDATION_LOCAL)
PERSONAL_VALIDATION_BEFORE = "personal.validation_acc.before"
PERSONAL_VALIDATION_AFTER = "personal.validation_acc.after"
LOCAL_ONLY = "local_only.test_acc"
FLEET = "fleet.test_acc"
FLEET_LOST = "fleet.test_samples.lost"
FLEET_GAINED = "fleet.test_samples.gained"
"""As TEST_LOST and TEST_GAINED, by the fleet's heads of two releases alone."""
PROMISE_LOST = "promise.test_samples.lost"
PROMISE_GAINED = "promise.test_samples.gained"
"""As TEST_LOST and TEST_GAINED, of samples whose prediction set has the right class, as far as sets follow from a release alone."""
OWN_WEIGHT = "served.own_weight"
"""How far a served head follows from a device's own labels alone rather than from the fleet's head, 0..1."""
UNSEEN_TEST = "unseen.test_acc"
UNSEEN_AFTER = "unseen.test_acc.after"
UNSEEN_SERVED = "unseen.test_acc.served"
TEST_SAMPLES = "test_samples"
TEST_EFFECTIVE = "test_samples.effective"
VALIDATION_SAMPLES = "validation_samples"
TEST_LOST = "test_samples.lost"
TEST_GAINED = "test_samples.gained"
VALIDATION_LOST = "validation_samples.lost"
VALIDATION_GAINED = "validation_samples.gained"
"""Images that became wrong, and that became right: test images with another release, validation images with the candidate of a round. Of
test images a device counts groups of images that belong together (`edge_fl.data.grouping`), and how many independent ones would be as
certain (`test_samples.effective`): fewer in cross-validation, and where they stand for different numbers of images."""

HEAD = "head."
"""Prefix of `of_head`."""

LATENCY_BEFORE = "latency_ms.before"
LATENCY_AFTER = "latency_ms.after"
"""Milliseconds per image of the extractor on the device."""

EPSILON = "privacy.epsilon"
"""Epsilon spent by a device's updates so far."""

USED_BYTES = "used_today.bytes"
USED_CPU = "used_today.cpu_s"
USED_ENERGY = "used_today.kilojoules_estimated"
"""A device's use on the day of the report: payload bytes in both directions, processor seconds, energy estimated from these."""

COUNTS = frozenset(
    {
        TEST_SAMPLES,
        TEST_EFFECTIVE,
        VALIDATION_SAMPLES,
        TEST_LOST,
        TEST_GAINED,
        VALIDATION_LOST,
        VALIDATION_GAINED,
        FLEET_LOST,
        FLEET_GAINED,
        PROMISE_LOST,
        PROMISE_GAINED,
    }
)
"""Counts of samples, which are not summarised over the fleet."""

ACCURACY, TEST_ACCURACY = "_acc", "test_acc"
"""Accuracies, and no other metrics, have this in their name; those on test samples the second."""

MAX_MAGNITUDE = 1e15
"""Limit of a metric in a report that is neither an accuracy nor a count."""

LAST = "last"
BEST_BY_VALIDATION = "best_by_validation"
"""The round of a reported number: the last one, or the best by validation accuracy (never by test accuracy)."""

PARTICIPANTS = "participants"
"""Suffix: mean over clients that took part at least once; without it over all clients."""


def is_plausible(name: str, value: float) -> bool:
    """Whether a report may carry this value: accuracies in [0, 1], counts in [0, MAX_SAMPLES], others within +-MAX_MAGNITUDE."""
    if ACCURACY in name:
        return 0 <= value <= 1
    if name in COUNTS:
        return 0 <= value <= MAX_SAMPLES
    return abs(value) <= MAX_MAGNITUDE


class Summary(Struct, frozen=True, forbid_unknown_fields=True):
    """Summary of one value per client over `clients` clients (`summarise`); all values are NaN without clients."""

    mean: float
    weighted_mean: float
    std: float
    bottom_decile: float
    clients: int


def accuracy(predicted: NDArray[Any], y: NDArray[Any]) -> float:
    """Share of correct predictions, 0..1; NaN without samples."""
    return float(np.mean(predicted == y)) if len(y) else float("nan")


def afterwards(found: Mapping[str, float]) -> dict[str, float]:
    """Rename an evaluation's `before` metrics to `after`: it was made after final personalisation."""
    return {name.replace(".before", ".after"): value for name, value in found.items()}


def summarise(values: Sequence[float], weights: Sequence[float] | None = None) -> Summary:
    """Mean, mean weighted by the clients' test samples, std over clients (population), and the bottom decile of one value per client.

    The bottom decile is the mean over the tenth of the clients with the lowest values, rounded up, so at least one client. Clients with
    NaN (no samples) are not counted. Without weights, or if they sum to 0, the weighted mean is the mean.
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
    lowest = np.sort(every)[: -(-len(every) // 10)]
    weighted = np.average(every, weights=weight) if weight.sum() > 0 else every.mean()
    return Summary(float(every.mean()), float(weighted), float(every.std()), float(lowest.mean()), len(every))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval for the mean of independent values; NaN for a single value."""
    if len(values) < 2:
        return math.nan, math.nan
    return interval_around(float(np.mean(values)), float(np.std(values, ddof=1)), len(values))


def interval_around(mean: float, std: float, n: int) -> tuple[float, float]:
    """Student's 95 % interval for the mean of n >= 2 independent values with this standard deviation (n - 1 in the denominator)."""
    from scipy.special import stdtrit  # comes with scikit-learn

    reach = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * std / math.sqrt(n)
    return mean - reach, mean + reach


def summarise_reports(
    reports: Sequence[Mapping[str, float]], weight: str = TEST_SAMPLES
) -> dict[str, Summary]:
    """A summary per metric over the clients' reports (metric -> value), weighted by each report's entry `weight` (0 if missing).

    Sample counts are not summarised.
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
    """The name of a metric in the best round by validation; without this suffix it is of the last round."""
    return f"{name}.{BEST_BY_VALIDATION}"


def candidate(kind: str) -> str:
    """Name of a head kind's accuracy on held-out samples during automatic selection (`edge_fl.heads.auto`)."""
    return f"auto.{kind}.validation_acc"


def at_labels(labels: int, kind: str) -> str:
    """Name of a head kind's accuracy on held-out samples when fitted on `labels` samples per class."""
    return f"labels_{labels}.{kind}.validation_acc"


def of_head(kind: str) -> str:
    """Name of the test accuracy of a head of this kind, fitted on the final extractor (`Recipe.heads`)."""
    return f"{HEAD}{kind}.test_acc"


def head_of(name: str) -> str:
    """The kind of head of a metric `of_head`; empty for any other name."""
    kind = name.removeprefix(HEAD).removesuffix(".test_acc")
    return kind if name == of_head(kind) else ""


def by_labels(found: Mapping[str, V]) -> dict[str, dict[int, V]]:
    """The values of `at_labels` metrics: kind of head -> labels per class -> value."""
    curves: dict[str, dict[int, V]] = {}
    for name, value in found.items():
        text, _, rest = name.removeprefix("labels_").partition(".")
        kind, _, what = rest.partition(".")
        labels = whole(text, MAX_LABELS)
        if labels is not None and what and name == at_labels(labels, kind):
            curves.setdefault(kind, {})[labels] = value
    return curves


def best_round(validation: Sequence[float]) -> int | None:
    """Index of the highest validation value, the first of equals; None if all are NaN or there are none."""
    values = np.asarray(validation, np.float64)
    return int(np.nanargmax(values)) if np.isfinite(values).any() else None
