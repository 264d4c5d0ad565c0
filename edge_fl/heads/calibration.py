"""Calibration of a head on out-of-fold predictions: temperature, threshold for a target precision, rejection by feature distance.

The labelled samples are divided into FOLDS folds; a head fitted on the others predicts each of them, so no sample is needed for this alone.

- The temperature divides the logits (Guo et al., ICML 2017). Here it is the one at which the mean probability of the predicted classes
  equals the accuracy, (right + 1/2) / (n + 1). With a few dozen samples this is better calibrated on unseen ones than the maximum
  likelihood.
- The threshold of a target precision is the lowest probability above which both the observed and the expected precision (the mean
  probability) of the out-of-fold predictions reach the target.
- The distance of a sample is 1 minus the cosine between it and the nearest class mean, both as directions
  (`edge_fl.heads.linear.direction`). Its percentile is the share of the out-of-fold distances below it; a sample above the percentile
  1 - false alarm rate is unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError
from edge_fl.heads.descent import probabilities
from edge_fl.heads.head import Array, Features, Head
from edge_fl.heads.linear import direction

FOLDS = 5
ENOUGH = 1000
"""Out-of-fold predictions after which no further fold is computed."""
LEAST = 20
"""Out-of-fold predictions below which there is neither a threshold nor a rejection."""
LEAST_ANSWERED = 5
TEMPERATURES = (1e-3, 1e3)
HALVINGS = 40
NOTHING = np.empty(0, np.float32)

Labels = NDArray[np.int64]
FitHead = Callable[[Features, Labels], Head]
"""Fits a head of one kind on features z [n, d] and class ids y [n]."""


@dataclass(frozen=True)
class Threshold:
    """Probability from which a prediction counts as an answer, with the share of the out-of-fold predictions that reach it.

    `problem` says why no probability guarantees the target; then nothing is answered.
    """

    probability: float
    coverage: float
    problem: str = ""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Out-of-fold predictions of a head, in ascending order of their samples, and what follows from them.

    confidences float32 [m]: calibrated probability of the predicted class; right bool [m]: whether it is the label. means float32 [k, d]:
    class means as directions; distances float32 [m]: out-of-fold distances, ascending.
    """

    temperature: float
    confidences: Features
    right: NDArray[np.bool_]
    means: Features
    distances: Features

    @property
    def accuracy(self) -> float:
        """Out-of-fold accuracy; 0 without predictions."""
        return float(self.right.mean()) if len(self.right) else 0.0

    def probabilities(self, logits: Features) -> Features:
        """Logits [n, C] -> calibrated probabilities float32 [n, C]."""
        return probabilities(logits / np.float32(self.temperature))

    def threshold(self, precision: float) -> Threshold:
        """Return the threshold for a target precision in 0..1; 0 answers everything."""
        if precision <= 0:
            return Threshold(0.0, 1.0)
        held_out = len(self.right)
        if held_out < LEAST:
            return Threshold(np.inf, 0.0, f"{held_out} held-out predictions, expected {LEAST} or more")
        order = np.argsort(-self.confidences, kind="stable")
        numbers = np.arange(1, held_out + 1)
        observed = np.cumsum(self.right[order]) / numbers
        expected = np.cumsum(self.confidences[order]) / numbers
        reached = np.flatnonzero((np.minimum(observed, expected) >= precision) & (numbers >= LEAST_ANSWERED))
        if not len(reached):
            best = float(np.minimum(observed, expected)[LEAST_ANSWERED - 1 :].max())
            return Threshold(np.inf, 0.0, f"at most {best:.2f} on {held_out} held-out predictions")
        last = int(reached[-1])
        return Threshold(float(self.confidences[order[last]]), (last + 1) / held_out)

    def percentiles(self, z: Features) -> Features:
        """Features z [n, d] -> percentiles in 0..1 of their distances, float32 [n]; 0 with fewer than LEAST distances."""
        if len(self.distances) < LEAST:
            return np.zeros(len(z), np.float32)
        below = np.searchsorted(self.distances, distance(self.means, z))
        return (below / len(self.distances)).astype(np.float32)

    def to_arrays(self) -> dict[str, Array]:
        """Arrays by name, for the file of the head (`from_arrays` is the inverse)."""
        return {
            "temperature": np.array([self.temperature], np.float32),
            "confidences": self.confidences,
            "right": self.right.astype(np.uint8),
            "means": self.means,
            "distances": self.distances,
        }


UNCALIBRATED = Calibration(1.0, NOTHING, NOTHING.astype(np.bool_), NOTHING.reshape(0, 0), NOTHING)


def from_arrays(arrays: Mapping[str, Array]) -> Calibration:
    """Rebuild a calibration from its `to_arrays()`; without arrays, as in old files, UNCALIBRATED. Raises ArtefactError."""
    if not arrays:
        return UNCALIBRATED
    expected = UNCALIBRATED.to_arrays()
    usable = arrays.keys() == expected.keys() and all(
        array.ndim == expected[name].ndim and array.dtype == expected[name].dtype and np.isfinite(array).all()
        for name, array in arrays.items()
    )
    if not usable or arrays["temperature"].shape != (1,) or arrays["temperature"][0] <= 0:
        raise ArtefactError(f"calibration: {', '.join(arrays)}, expected finite {', '.join(expected)}")
    if arrays["confidences"].shape != arrays["right"].shape:
        raise ArtefactError("calibration: confidences and right differ in length")
    return Calibration(
        float(arrays["temperature"][0]),
        arrays["confidences"],
        arrays["right"].astype(np.bool_),
        arrays["means"],
        arrays["distances"],
    )


def calibrate(
    fit: FitHead,
    z: Features,
    y: Labels,
    *,
    budget_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Calibration:
    """Calibrate the head that `fit` fits on z and y; UNCALIBRATED with a single class.

    At least one fold is predicted, further ones within `budget_s`. Samples whose class is missing in the other folds do not count.
    """
    if len(np.unique(y)) < 2:
        return UNCALIBRATED
    fold, ends_s = folds(y), clock() + budget_s
    rows: list[Labels] = []
    logits: list[Features] = []
    distances: list[Features] = []
    for number in range(FOLDS):
        out, rest = fold == number, fold != number
        known = np.flatnonzero(out & np.isin(y, y[rest]))
        if not len(known) or len(np.unique(y[rest])) < 2:
            continue
        if rows and (sum(map(len, rows)) >= ENOUGH or clock() >= ends_s):
            break
        rows.append(known)
        logits.append(fit(z[rest], y[rest]).logits(z[known]))
        distances.append(distance(class_means(z[rest], y[rest]), z[known]))
    means = class_means(z, y)
    if not rows:
        return replace(UNCALIBRATED, means=means)
    order = np.argsort(np.concatenate(rows))
    held, labels = np.concatenate(logits)[order], y[np.concatenate(rows)[order]]
    temperature = best_temperature(held, labels)
    shares = probabilities(held / np.float32(temperature))
    return Calibration(
        temperature,
        shares.max(axis=1),
        shares.argmax(axis=1) == labels,
        means,
        np.sort(np.concatenate(distances)),
    )


def folds(y: Labels) -> Labels:
    """Stratified folds [n] in 0..FOLDS-1; a class continues where the one before ended, so that folds differ by at most one in size."""
    fold = np.empty(len(y), np.int64)
    fold[np.argsort(y, kind="stable")] = np.arange(len(y)) % FOLDS
    return fold


def best_temperature(logits: Features, y: Labels) -> float:
    """The temperature in TEMPERATURES at which the mean probability of the predicted classes is the accuracy, by bisection."""
    accuracy = (np.sum(logits.argmax(axis=1) == y) + 0.5) / (len(y) + 1)
    low, high = np.log(TEMPERATURES)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        confidence = probabilities(logits / np.float32(np.exp(middle))).max(axis=1).mean()
        low, high = (middle, high) if confidence > accuracy else (low, middle)
    return float(np.exp(middle))


def class_means(z: Features, y: Labels) -> Features:
    """Means [k, d] of the directions of each class, themselves as directions of length 1."""
    u = direction(z)
    means = np.stack([u[y == label].mean(axis=0) for label in np.unique(y)])
    lengths = np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    scaled: Features = (means / lengths).astype(np.float32)
    return scaled


def distance(means: Features, z: Features) -> Features:
    """1 minus the cosine to the nearest class mean, float32 [n]."""
    distances: Features = (1 - (direction(z) @ means.T).max(axis=1)).astype(np.float32)
    return distances
