"""Linear heads: logistic regression, support vector machine, nearest class mean, ridge regression on directions, a constant.

Settings are in docs/methods-on-devices.md, "Heads". Logits are W (z - mean) / std + b for the classes present, -inf for the others;
those of the cosine head are linear in the direction of z.
"""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray

from edge_fl.heads.descent import received
from edge_fl.heads.head import (
    SHORTEST,
    Array,
    Features,
    FittableHead,
    Graph,
    TrainingSet,
    identity_scaling,
    over_all,
    require_features,
    standardisation,
)

RIDGE = 0.3
SHARPNESS = np.float32(10)
"""Factor on the regression's values, whose softmax is otherwise far too flat; 9 to 12 is best on PACS (docs/devices.md, "Predictions")."""

Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Linear(FittableHead, ABC):
    """weights [k, d] and bias [k] for the k classes `present` (ascending ids), on features standardised by mean and std [d]."""

    weights: Features
    bias: Features
    mean: Features
    std: Features
    present: NDArray[np.int64]

    shapes: ClassVar[Mapping[str, str]] = {
        "weights": "kd",
        "bias": "k",
        "mean": "d",
        "std": "d",
        "present": "k",
    }

    def logits(self, z: Features) -> Features:
        require_features(z, len(self.mean), self.kind)
        known = ((z - self.mean) / self.std) @ self.weights.T + self.bias
        return over_all(self.classes, self.present, known)

    def graph(self, graph: Graph, z: str) -> str:
        u = graph.standardised(z, self.mean, self.std)
        return graph.scattered(u, self.weights, self.bias, self.present, self.classes)


@final
class Logistic(Linear):
    """Multinomial logistic regression, L2 with C = 1, on standardised features; logits are log-probabilities up to a constant."""

    kind: ClassVar[str] = "logistic"

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        from sklearn.linear_model import LogisticRegression

        model = LogisticRegression(
            C=1.0, solver="lbfgs", max_iter=2000, class_weight=_class_weight(data), warm_start=True
        )
        mean, std = standardisation(data)
        _start(model, data, mean, std)
        weights, bias = _solve(model, data, mean, std)
        return cls(data.classes, data.extractor, weights, bias, mean, std, data.present)


@final
class Svm(Linear):
    """Linear support vector machine, one versus rest, squared hinge, C = 1; standardises unless features have length 1."""

    kind: ClassVar[str] = "svm"

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        from sklearn.svm import LinearSVC

        model = LinearSVC(
            C=1.0, dual="auto", max_iter=10_000, class_weight=_class_weight(data), random_state=0
        )
        mean, std = (identity_scaling if data.unit_norm else standardisation)(data)
        weights, bias = _solve(model, data, mean, std)
        return cls(data.classes, data.extractor, weights, bias, mean, std, data.present)


@final
class Nearest(Linear):
    """Nearest class mean, without iterations; standardises unless features have length 1; always balanced."""

    kind: ClassVar[str] = "nearest"

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        mean, std = (identity_scaling if data.unit_norm else standardisation)(data)
        u = (data.z - mean) / std
        means = np.stack([u[data.y == label].mean(axis=0) for label in data.present])
        bias = -0.5 * np.square(means).sum(axis=1)  # -|u - m|^2 / 2, up to a term that all classes share
        return cls(data.classes, data.extractor, means, bias.astype(np.float32), mean, std, data.present)


@final
@dataclass(frozen=True, eq=False)
class Cosine(FittableHead):
    """Ridge regression of the one-hot labels on directions of features: for frozen backbones, with few labels in many dimensions.

    weights [k, d] and bias [k] for the k classes `present`. A closed form; needs no scikit-learn.
    """

    weights: Features
    bias: Features
    present: NDArray[np.int64]

    kind: ClassVar[str] = "cosine"
    shapes: ClassVar[Mapping[str, str]] = {"weights": "kd", "bias": "k", "present": "k"}

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        targets = data.y[:, None] == data.present
        weights, bias = regress(direction(data.z).astype(np.float64), targets, data.weights)
        return cls(
            data.classes,
            data.extractor,
            np.ascontiguousarray(SHARPNESS * weights, np.float32),
            (SHARPNESS * bias).astype(np.float32),
            data.present,
        )

    def logits(self, z: Features) -> Features:
        require_features(z, self.weights.shape[1], self.kind)
        return over_all(self.classes, self.present, direction(z) @ self.weights.T + self.bias)

    def graph(self, graph: Graph, z: str) -> str:
        u = graph.direction(z)
        return graph.scattered(u, self.weights, self.bias, self.present, self.classes)


def regress(u: Doubles, targets: Array, sample_weights: Doubles) -> tuple[Doubles, Doubles]:
    """Ridge regression with intercept of targets [n, k] on u [n, d] -> weights [k, d], bias [k]."""
    shares = sample_weights / sample_weights.sum()
    mean, average = shares @ u, shares @ targets
    u = np.sqrt(sample_weights)[:, None] * (u - mean)
    targets = np.sqrt(sample_weights)[:, None] * (targets - average)
    if len(u) <= u.shape[1]:
        weights = np.asarray(np.linalg.solve(u @ u.T + RIDGE * np.eye(len(u)), targets).T @ u)
    else:
        weights = np.asarray(np.linalg.solve(u.T @ u + RIDGE * np.eye(u.shape[1]), u.T @ targets).T)
    return weights, average - weights @ mean


def direction(z: Features) -> Features:
    """The signed square root of the features, scaled to length 1, so that few large features do not dominate."""
    u = np.sign(z) * np.sqrt(np.abs(z))
    lengths = np.maximum(np.linalg.norm(u, axis=1, keepdims=True), SHORTEST)
    scaled: Features = (u / lengths).astype(np.float32)
    return scaled


def _start(model: Any, data: TrainingSet, mean: Features, std: Features) -> None:
    """Start `model` from the head of the release, converted to standardised features; the minimum stays the same."""
    if data.plan.start not in data.extras:
        return
    head, present = received(data, data.plan.start), data.present
    weights = (head.weight * std).astype(np.float64)[present]
    bias = head.logits(mean[None])[0].astype(np.float64)[present]
    if len(present) == 2:
        weights, bias = weights[1:] - weights[:1], bias[1:] - bias[:1]
    model.coef_, model.intercept_, model.classes_ = weights, bias, present


def _class_weight(data: TrainingSet) -> str | None:
    return "balanced" if data.balanced else None


def _solve(model: Any, data: TrainingSet, mean: Features, std: Features) -> tuple[Features, Features]:
    """weights [k, d] and bias [k] from `model.fit`, C-ordered for saving.

    Two classes share one decision f: they get -f/2 and f/2, whose difference is f and whose softmax is its sigmoid.
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # stopped at max_iter: still a usable head
        model.fit(((data.z - mean) / std).astype(np.float64), data.y)
    weights, bias = model.coef_, model.intercept_
    if len(data.present) == 2:
        weights, bias = np.concatenate([-weights, weights]) / 2, np.concatenate([-bias, bias]) / 2
    return np.ascontiguousarray(weights, np.float32), np.ascontiguousarray(bias, np.float32)


@final
@dataclass(frozen=True, eq=False)
class Constant(FittableHead):
    """The most frequent class; any kind becomes this one for a client with a single class.

    present int64 [1]; accepts features of any width.
    """

    present: NDArray[np.int64]

    kind: ClassVar[str] = "constant"
    shapes: ClassVar[Mapping[str, str]] = {"present": "1"}

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        return cls(data.classes, data.extractor, np.array([np.bincount(data.y).argmax()], np.int64))

    def logits(self, z: Features) -> Features:
        return over_all(self.classes, self.present, np.zeros((len(z), 1), np.float32))

    def graph(self, graph: Graph, z: str) -> str:
        return graph.scattered(z, np.zeros(graph.dim), np.zeros(1), self.present, self.classes)
