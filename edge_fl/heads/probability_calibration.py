"""Calibration of a head on out-of-fold predictions: temperature, accuracy, prediction sets, rejection by feature distance.

No sample is needed for this alone: a served head (`edge_fl.heads.served`) knows what it would predict of each sample without its fold; for
any other kind a head fitted on the other folds predicts each of FOLDS folds. No fold cuts a group (`edge_fl.data.grouping`), and every
group counts once, so that frames of one scene do not count as many. Samples that were labelled because they are informative count less
(`importance`), so that accuracy and probabilities are those of all pictures. Folds have one group of every class where labels are few.

- A head without a fleet's head is worse without a fold than with all labels. Its error falls about as a power of the number of labels,
  from 1 without any; so that of the predictions is reduced by what one label of each class adds, as far as the head follows from own labels
  alone (`correction`).

- The temperature divides the logits (Guo et al., ICML 2017). Here it is the one at which the mean probability of the predicted classes
  equals the accuracy, (right + 1/2) / (n + 1) of n groups. With a few dozen samples this is better calibrated on unseen ones than the
  maximum likelihood.
- Prediction sets that keep a promise: `edge_fl.heads.promise`.
- The distance of a sample from the labelled ones (`edge_fl.heads.unknowns`) has a percentile, the share of the out-of-fold distances below
  it; a sample above the percentile 1 - false alarm rate is unknown. One whose predicted class has no label never is: only the fleet knows
  how far its samples are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups, Importance
from edge_fl.errors import ArtefactError
from edge_fl.heads import promise as promises
from edge_fl.heads import unknowns
from edge_fl.heads.descent import probabilities
from edge_fl.heads.head import Array, Features, Head, TrainingSet
from edge_fl.heads.promise import Promise
from edge_fl.heads.served import Estimate
from edge_fl.heads.unknowns import NO_CLASSES, KnownClasses

FOLDS = 5
ENOUGH = 1000
"""Groups with out-of-fold predictions after which no further fold is computed."""
LEAST = 20
"""Groups with out-of-fold predictions below which there is no rejection."""
LEAST_MEASURED = 8
"""Groups with out-of-fold predictions below which no accuracy is shown."""
LEAST_REPRESENTED = 0.9
"""Share of all pictures that the labelled ones must stand for: without labels chosen at random, the others are not measured."""
CORRELATED = 1.5
"""Variance of the shown accuracy over that of independent samples: predictions without a sample share all other samples. Measured 1.0 to
1.6 for 10 to 100 labels (`python -m tools.study.shown_accuracy`)."""
TEMPERATURES = (1e-3, 1e3)
HALVINGS = 40
NOTHING = np.empty(0, np.float32)
GROUPS, FLEET, IMPORTANCE, CONTRADICTED = "groups", "fleet", "importance", "contradicted"
LABELS = "labels"
"""Names of the arrays that are only in the file where pictures share a group, where there is a fleet's head, where pictures stand for
different numbers of pictures, where labels contradict the fleet's head, and in files of newer agents."""
CLASSES, APART = "classes", "apart"
"""Names of the arrays of `KnownClasses` that old files lack; with those nothing is unknown until the next fit."""

Labels = NDArray[np.int64]
FitHead = Callable[[Features, Labels], Head]
"""Fits a head of one kind on features z [n, d] and class ids y [n]."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Out-of-fold predictions of a head, in ascending order of their samples, and what follows from them.

    confidences float32 [m]: calibrated probability of the predicted class; right bool [m]: whether it is the label. known: the classes
    with labels; distances float32 [m]: out-of-fold distances from them. groups int64 [m], or empty: all alone. fleet bool [m]: whether
    the fleet's head is right about the same samples; empty without one. correction: factor on the error of the predictions.
    own_weight: how far the head follows from own labels alone, 0..1. importance float64 [m], or empty: how many pictures each stands for,
    divided by the mean. contradicted int64 [k, 2]: class ids of labels, and what most of them are to the fleet's head. labels int64 [m]:
    class ids; empty from older files.
    """

    temperature: float
    confidences: Features
    right: NDArray[np.bool_]
    known: KnownClasses
    distances: Features
    groups: Groups = field(default_factory=grouping.alone)
    fleet: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    correction: float = 1.0
    own_weight: float = 1.0
    importance: Importance = field(default_factory=lambda: np.empty(0))
    contradicted: Labels = field(default_factory=lambda: np.empty((0, 2), np.int64))
    promise: Promise = promises.UNMEASURED
    labels: Labels = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def is_measured(self) -> bool:
        """Whether there are enough labels to say how accurate the head is, and they stand for all pictures."""
        represented = float(self.importance.mean()) if len(self.importance) else 1.0
        return self.scenes >= LEAST_MEASURED and represented >= LEAST_REPRESENTED

    @property
    def accuracy(self) -> float:
        """Accuracy on new samples; 0 without predictions."""
        if not len(self.right):
            return 0.0
        return 1 - self.correction * (1 - grouping.mean(self.right, self.groups, self.importance))

    @property
    def fleet_accuracy(self) -> float | None:
        """Accuracy of the fleet's head on the same samples; None without one."""
        return grouping.mean(self.fleet, self.groups, self.importance) if len(self.fleet) else None

    @property
    def scenes(self) -> int:
        """Groups among the out-of-fold predictions."""
        return grouping.count(self.groups, len(self.right))

    @property
    def interval(self) -> tuple[float, float]:
        """90 % interval of the accuracy on new scenes."""
        return grouping.interval(self.accuracy, self.independent)

    @property
    def effective(self) -> float:
        """Groups that all count alike from which the accuracy would be as certain."""
        return grouping.effective(self.groups, len(self.right), self.importance)

    @property
    def independent(self) -> float:
        """Groups of test samples from which the accuracy would be as certain."""
        return self.effective / CORRELATED

    def of_class(self, label: int) -> Calibration:
        """What is known of the samples of one class: its accuracy is the recall."""
        mine = self.labels == label
        names = ("confidences", "right", "distances", "groups", "fleet", "importance", "labels")
        found = {name: getattr(self, name) for name in names}
        return replace(self, **{name: array[mine] for name, array in found.items() if len(array)})

    def probabilities(self, logits: Features) -> Features:
        """Logits [n, C] -> calibrated probabilities float32 [n, C]."""
        return probabilities(logits / np.float32(self.temperature))

    def percentiles(self, z: Features, predicted: Labels) -> Features:
        """Features z [n, d] and their predicted class ids [n] -> percentiles in 0..1 of their distances, float32 [n].

        0 with fewer than LEAST groups, and where the predicted class has no labels.
        """
        if self.scenes < LEAST or not len(self.known.classes):
            return np.zeros(len(z), np.float32)
        found = unknowns.percentiles(self.distances, self._weights, self.known.distances(z))
        return found * np.isin(predicted, self.known.classes)

    def are_more(self, unknown: int, n: int, false_alarm: float) -> bool:
        """Whether so many unknown ones of n samples are more than false alarms explain."""
        return bool(n) and unknown > n * unknowns.by_chance(false_alarm, max(self.effective, 1.0), n)

    @property
    def _weights(self) -> NDArray[np.float64]:
        return _weights(self.groups, len(self.right), self.importance)

    def to_arrays(self) -> dict[str, Array]:
        """Arrays by name, for the file of the head (`from_arrays` is the inverse)."""
        arrays: dict[str, Array] = {
            "temperature": np.array([self.temperature], np.float32),
            "correction": np.array([self.correction, self.own_weight]),
            "confidences": self.confidences,
            "right": self.right.astype(np.uint8),
            "means": self.known.means,
            "distances": self.distances,
        }
        if not grouping.are_alone(self.groups):
            arrays[GROUPS] = self.groups
        if len(self.fleet):
            arrays[FLEET] = self.fleet.astype(np.uint8)
        if len(self.importance):
            arrays[IMPORTANCE] = self.importance
        if len(self.contradicted):
            arrays[CONTRADICTED] = self.contradicted
        if len(self.labels):
            arrays[LABELS] = self.labels
        if len(self.known.classes):
            arrays[CLASSES] = self.known.classes
        if len(self.known.apart):
            arrays[APART] = self.known.apart
        return arrays | self.promise.to_arrays()


UNCALIBRATED = Calibration(1.0, NOTHING, NOTHING.astype(np.bool_), NO_CLASSES, NOTHING)


def from_arrays(arrays: Mapping[str, Array]) -> Calibration:
    """Rebuild a calibration from its `to_arrays()`; without arrays, as in old files, UNCALIBRATED. Raises ArtefactError."""
    if not arrays:
        return UNCALIBRATED
    promise = promises.from_arrays(arrays)
    arrays = {name: array for name, array in arrays.items() if name not in promises.ARRAYS}
    expected = {
        name: array for name, array in UNCALIBRATED.to_arrays().items() if name not in promises.ARRAYS
    }
    if GROUPS in arrays:
        expected[GROUPS] = UNCALIBRATED.groups
    if FLEET in arrays:
        expected[FLEET] = UNCALIBRATED.fleet.astype(np.uint8)
    if IMPORTANCE in arrays:
        expected[IMPORTANCE] = UNCALIBRATED.importance
    if CONTRADICTED in arrays:
        expected[CONTRADICTED] = UNCALIBRATED.contradicted
    if LABELS in arrays:
        expected[LABELS] = UNCALIBRATED.labels
    if CLASSES in arrays:
        expected[CLASSES] = NO_CLASSES.classes
    if APART in arrays:
        expected[APART] = NO_CLASSES.apart
    usable = arrays.keys() == expected.keys() and all(
        array.ndim == expected[name].ndim and array.dtype == expected[name].dtype and np.isfinite(array).all()
        for name, array in arrays.items()
    )
    if not usable or arrays["temperature"].shape != (1,) or arrays["temperature"][0] <= 0:
        raise ArtefactError(f"calibration: {', '.join(arrays)}, expected finite {', '.join(expected)}")
    same = ("confidences", "right", FLEET, IMPORTANCE, LABELS)
    sizes = {len(arrays[name]) for name in same if name in arrays}
    contradicted = arrays.get(CONTRADICTED, UNCALIBRATED.contradicted)
    if len(sizes) > 1 or arrays["correction"].shape != (2,) or contradicted.shape[1] != 2:
        raise ArtefactError("calibration: confidences, right, fleet, importance and labels differ in length")
    groups = arrays.get(GROUPS, grouping.alone())
    if len(groups) not in (0, len(arrays["right"])) or len(arrays["distances"]) != len(arrays["right"]):
        raise ArtefactError("calibration: distances or groups differ in length from the predictions")
    means, classes = arrays["means"], arrays.get(CLASSES, NO_CLASSES.classes)
    apart = arrays.get(APART, NO_CLASSES.apart)
    if len(classes) not in (0, len(means)) or len(apart) not in (0, means.shape[1]):
        raise ArtefactError(
            f"calibration: means {list(means.shape)}, {len(classes)} classes, apart [{len(apart)}], expected as many"
            " classes as means and as many features"
        )
    return Calibration(
        float(arrays["temperature"][0]),
        arrays["confidences"],
        arrays["right"].astype(np.bool_),
        KnownClasses(classes, means, apart),
        arrays["distances"],
        groups,
        arrays.get(FLEET, np.empty(0)).astype(np.bool_),
        correction=float(arrays["correction"][0]),
        own_weight=float(arrays["correction"][1]),
        importance=arrays.get(IMPORTANCE, np.empty(0)),
        contradicted=contradicted,
        promise=promise,
        labels=arrays.get(LABELS, UNCALIBRATED.labels),
    )


def of_estimate(estimate: Estimate, data: TrainingSet) -> Calibration:
    """The calibration of a served head, from what it would predict of each sample without its fold."""
    rows = estimate.rows
    y, groups = data.y[rows], grouping.numbers(data.groups, len(data.y))
    scenes, held = groups[rows], estimate.logits.astype(np.float32)
    importance = data.importance[rows] if len(data.importance) else data.importance
    promise = promises.of(
        held,
        y,
        grouping.weights(scenes, len(rows), importance),
        estimate.head.logits(data.unlabelled) if len(data.unlabelled) else held[:0],
        fleet=promises.received(data.extras.get(data.plan.fleet, {}), bool(len(rows))),
    )
    if not len(rows):
        return replace(UNCALIBRATED, promise=promise)
    if estimate.fleet is not None:
        weights = grouping.weights(scenes, len(rows), importance)
        own = promises.for_fleet(estimate.fleet.astype(np.float32), held, y, weights)
        promise = replace(promise, own=own)
    known, distances = _measured(data.z, data.y, rows, groups, importance, data.unlabelled)
    fleet = np.empty(0, np.bool_) if estimate.fleet is None else estimate.fleet.argmax(axis=1) == y
    found = _calibration(
        held,
        y,
        known,
        distances,
        grouping.normal(scenes),
        fleet,
        estimate.own_weight,
        importance,
    )
    contradicted = np.array(estimate.contradicted, np.int64).reshape(-1, 2)
    return replace(found, contradicted=contradicted, promise=promise)


def _measured(
    z: Features, y: Labels, rows: Labels, groups: Groups, importance: Importance, unlabelled: Features
) -> tuple[KnownClasses, Features]:
    """The classes with labels, and the out-of-fold distances [m] of the `rows` [m] of z [n, d], whose groups [n] no fold cuts.

    importance [m]: of the rows; unlabelled [p, d]: features of samples without a label.
    """
    weights = _weights(groups[rows], len(rows), importance)
    fold = grouping.folds(y[rows], groups[rows], FOLDS)
    parts = [np.flatnonzero(fold == number) for number in np.unique(fold)]
    folds = [(rows[part], np.flatnonzero(~np.isin(groups, groups[rows[part]]))) for part in parts]
    order = np.concatenate(parts)
    known, far = unknowns.measured(z, y, folds, weights[order], unlabelled)
    distances = np.empty(len(rows), np.float32)
    distances[order] = far
    return known, distances


def _weights(groups: Groups, n: int, importance: Importance) -> NDArray[np.float64]:
    """How much each of n samples counts [n]; the sum is the number of groups that would be as certain if all counted alike."""
    weights = grouping.weights(groups, n, importance)
    return (
        weights * (grouping.effective(groups, n, importance) / weights.sum()) if len(importance) else weights
    )


def _correction(error: float, y: Labels, scenes: Groups) -> float:
    """The factor by which the error of a head of own labels alone falls from the labels [n] without a fold to all of them.

    Without a fold, as many groups of a class are left as without one, at least a half.
    """
    pairs = np.unique(np.column_stack([y, scenes if len(scenes) else np.arange(len(y))]), axis=0)
    kept = float(np.mean(np.maximum(1 - 1 / np.bincount(pairs[:, 0])[y], 0.5))) * len(pairs)
    return float(max(error, 1 / (len(pairs) + 1)) ** (np.log1p(len(pairs)) / np.log1p(kept) - 1))


def _calibration(
    logits: Features,
    y: Labels,
    known: KnownClasses,
    distances: Features,
    groups: Groups,
    fleet: NDArray[np.bool_],
    own_weight: float,
    importance: Importance,
) -> Calibration:
    temperature = best_temperature(logits, y, groups, importance)
    shares = probabilities(logits / np.float32(temperature))
    right = shares.argmax(axis=1) == y
    error = 1 - grouping.mean(right, groups, importance)
    return Calibration(
        temperature,
        shares.max(axis=1),
        right,
        known,
        distances,
        groups,
        fleet,
        _correction(error, y, groups) ** own_weight,
        own_weight,
        importance,
        labels=y,
    )


def calibrate(
    fit: FitHead,
    z: Features,
    y: Labels,
    groups: Groups | None = None,
    *,
    importance: Importance | None = None,
    unlabelled: Features | None = None,
    budget_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Calibration:
    """Calibrate the head that `fit` fits on z and y with `groups` [n] (default: all alone); UNCALIBRATED with a single class.

    `importance` [n] is as of `Calibration`; unlabelled [p, d]: features of samples without a label. At least one fold is predicted, further
    ones within `budget_s`. Samples whose class is missing in the other folds do not count: those of a class with a single group.
    """
    if len(np.unique(y)) < 2:
        return UNCALIBRATED
    scenes = grouping.numbers(grouping.alone() if groups is None else groups, len(y))
    fold, ends_s = grouping.folds(y, scenes, FOLDS), clock() + budget_s
    rows: list[Labels] = []
    logits: list[Features] = []
    for number in range(FOLDS):
        out, rest = fold == number, fold != number
        known = np.flatnonzero(out & np.isin(y, y[rest]))
        if not len(known) or len(np.unique(y[rest])) < 2:
            continue
        if rows and (len(np.unique(scenes[np.concatenate(rows)])) >= ENOUGH or clock() >= ends_s):
            break
        rows.append(known)
        logits.append(fit(z[rest], y[rest]).logits(z[known]))
    if not rows:
        return UNCALIBRATED
    predicted = np.concatenate(rows)
    order = np.argsort(predicted)
    predicted = predicted[order]
    held, labels, counted = np.concatenate(logits)[order], y[predicted], grouping.normal(scenes[predicted])
    given = np.empty(0) if importance is None or not len(importance) else importance[predicted]
    pool = z[:0] if unlabelled is None else unlabelled
    known_classes, far = _measured(z, y, predicted, scenes, given, pool)
    found = _calibration(held, labels, known_classes, far, counted, np.empty(0, np.bool_), 1.0, given)
    weights = grouping.weights(counted, len(labels), given)
    promise = promises.of(held, labels, weights, held[:0], temperature=found.temperature)
    return replace(found, promise=promise)


def best_temperature(
    logits: Features, y: Labels, groups: Groups, importance: Importance | None = None
) -> float:
    """The temperature in TEMPERATURES at which the mean probability of the predicted classes is the accuracy, by bisection."""
    count = grouping.effective(groups, len(y), importance)
    accuracy = (count * grouping.mean(logits.argmax(axis=1) == y, groups, importance) + 0.5) / (count + 1)
    low, high = np.log(TEMPERATURES)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        highest = probabilities(logits / np.float32(np.exp(middle))).max(axis=1)
        confidence = grouping.mean(highest, groups, importance)
        low, high = (middle, high) if confidence > accuracy else (low, middle)
    return float(np.exp(middle))
