"""The head `auto`: fit the candidate kinds, cheapest first, and keep the one with the best held-out accuracy.

With few labels this is usually the nearest class mean, with more labels logistic regression or an MLP; `curve` measures where they cross.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_fl import heads, metrics
from edge_fl.data import grouping
from edge_fl.data.grouping import Groups
from edge_fl.errors import ConfigError
from edge_fl.heads.head import Features, Head
from edge_fl.heads.probability_calibration import UNCALIBRATED, Calibration

AUTO = "auto"
CANDIDATES = ("nearest", "cosine", "logistic", "mlp", "svm")
CURVE_KINDS = ("nearest", "logistic", "mlp")
CURVE_LABELS = (1, 2, 5, 10, 20)
NUMBERS = (
    *(metrics.candidate(kind) for kind in CANDIDATES),
    *(metrics.at_labels(labels, kind) for labels in CURVE_LABELS for kind in CURVE_KINDS),
)
"""Names of all metrics that may be measured."""

MIN_HELD_OUT = 10
FOLDS = 3
Labels = NDArray[np.int64]
Fit = Callable[[str, Features, Labels], Head]
"""Fits a head of a kind on features z [n, d] and class ids y [n]."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The chosen head and its kind, the measured held-out accuracies by metric name, and the calibration, if requested."""

    head: Head
    numbers: dict[str, float] = field(default_factory=dict)
    kind: str = ""
    calibration: Calibration = UNCALIBRATED


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Features and labels for evaluation only, with their groups [n] (empty: all alone); fewer than MIN_HELD_OUT groups are too few."""

    z: Features
    y: Labels
    groups: Groups = field(default_factory=grouping.alone)

    @property
    def enough(self) -> bool:
        return grouping.count(self.groups, len(self.y)) >= MIN_HELD_OUT


def require_kinds(kinds: Iterable[str], where: str) -> None:
    """Check kinds of heads that a person chose. Raises ConfigError for one that is neither a head nor AUTO."""
    try:
        for kind in kinds:
            if kind != AUTO:
                heads.find(kind)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}; {AUTO!r} chooses among them") from error


def choose(
    fit: Fit,
    z: Features,
    y: Labels,
    held: HeldOut,
    groups: Groups | None = None,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """Choose the best of CANDIDATES within `budget_s` (the cheapest of equals), by accuracy on `held` or else by cross-validation, whose
    folds cut none of the `groups` [n] of the samples (default: all alone).

    The cheapest is always fitted; a candidate that runs out of memory is skipped. Raises the errors of the cheapest fit.
    """
    ends_s = clock() + budget_s
    best, scores = CANDIDATES[0], dict[str, float]()
    if len(np.unique(y)) > 1:
        for kind in CANDIDATES:
            if scores and clock() >= ends_s:
                break
            try:
                scores[kind] = _score(fit, kind, z, y, held, grouping.alone() if groups is None else groups)
            except MemoryError:
                continue
        best = max(scores, key=lambda kind: scores[kind], default=best)
    head = fit(best, z, y)
    numbers = {metrics.candidate(kind): score for kind, score in scores.items()}
    return Choice(head, numbers | curve(fit, z, y, held, lambda: clock() < ends_s), best)


def curve(fit: Fit, z: Features, y: Labels, held: HeldOut, goes_on: Callable[[], bool]) -> dict[str, float]:
    """Held-out accuracy by labels per class and kind, while labels suffice and `goes_on()`; empty without `held`."""
    numbers: dict[str, float] = {}
    if not held.enough or len(np.unique(y)) < 2:
        return numbers
    for labels, rows in _first_of_each(y):
        for kind in CURVE_KINDS:
            if not goes_on():
                return numbers
            numbers[metrics.at_labels(labels, kind)] = _accuracy(fit(kind, z[rows], y[rows]), held)
    return numbers


def _score(fit: Fit, kind: str, z: Features, y: Labels, held: HeldOut, groups: Groups) -> float:
    """Accuracy on `held`, or the mean over stratified folds if `held` is too small."""
    if held.enough:
        return _accuracy(fit(kind, z, y), held)
    fold = grouping.folds(y, groups, FOLDS)
    parts = [
        (fold != number, fold == number)
        for number in range(FOLDS)
        if (fold == number).any() and (fold != number).any()
    ]
    right = [
        _accuracy(
            fit(kind, z[rest], y[rest]), HeldOut(z[out], y[out], groups[out] if len(groups) else groups)
        )
        for rest, out in parts
    ]
    return float(np.mean(right)) if right else 0.0


def _accuracy(head: Head, held: HeldOut) -> float:
    return grouping.mean(head.predict(held.z) == held.y, held.groups)


def _first_of_each(y: Labels) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield the number of labels per class and a mask of these rows, as long as some class has that many."""
    rank = _rank(y)
    for labels in CURVE_LABELS:
        if labels <= rank.max() + 1:
            yield labels, rank < labels


def _rank(y: Labels) -> Labels:
    """Position of each sample within its class, from 0."""
    rank = np.empty(len(y), np.int64)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        rank[rows] = np.arange(len(rows))
    return rank
