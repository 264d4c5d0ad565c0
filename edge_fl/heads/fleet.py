"""The fleet's head: a linear head for all classes that comes with a release, and the served heads, which are adapted from it.

    logits = W φ(z) + b        φ(z) = z, or `direction(z)` where the head comes from class statistics

A release names the extra that holds it (`HeadPlan.fleet`): the method's shared head, its prototypes, a linear discriminant of features that
the server computed (`discriminant`), or the class statistics of the devices. `edge_fl.heads.served` adapts it to a device's labels.

Source: the linear discriminant of class means and one shared covariance is that of C. R. Rao, "The utilization of multiple measurements in
problems of biological classification", 1948; from sums over clients as in FedCGS (Z. Guan et al., AAAI 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError, StatisticsError
from edge_fl.failures import Failure
from edge_fl.heads.class_statistics import prior
from edge_fl.heads.head import Array, Features, Graph, Head, TrainingSet, over_all, require_features
from edge_fl.heads.linear import Doubles, direction

FLEET = "fleet"
"""Name of the extra with a head that the server computed."""
SCALE = "scale"
"""Name of an extra with a factor on the logits of the method's head (FedETF)."""


@dataclass(frozen=True, eq=False)
class FleetHead:
    """weights float64 [C, d] and bias [C] on φ(z), and the class shares [C] of the data that they were fitted on (1 / C: unknown).

    directed: whether φ is `direction`. known bool [C]: classes that the fleet has samples of. centre [d]: of φ(z) on this device, as far as
    it is known. samples: how many samples of each class it was fitted on, the harmonic mean over classes; infinite if that is unknown.
    spread [d]: the standard deviation of each feature in the fleet; 1 if that is unknown.
    factor: in `weights` and `bias` already, so that the probabilities fit devices that it was not fitted on; 1 if that is unknown.
    """

    weights: Doubles
    bias: Doubles
    shares: Doubles
    directed: bool
    known: NDArray[np.bool_]
    centre: Doubles
    samples: float = np.inf
    spread: Doubles | float = 1.0
    factor: float = 1.0

    def space(self, z: Features) -> Doubles:
        """φ(z), float64 [n, d]."""
        return (direction(z) if self.directed else z).astype(np.float64)

    def logits(self, z: Features) -> Doubles:
        """Features z [n, d] -> logits [n, C]."""
        return np.asarray(self.space(z) @ self.weights.T + self.bias)


@dataclass(frozen=True, eq=False)
class Adapted(Head):
    """weights [k, d] and bias [k] on φ(z) for the k classes `present`; -inf for the others."""

    weights: Features
    bias: Features
    present: NDArray[np.int64]

    shapes: ClassVar[Mapping[str, str]] = {"weights": "kd", "bias": "k", "present": "k"}
    directed: ClassVar[bool]

    def logits(self, z: Features) -> Features:
        require_features(z, self.weights.shape[1], self.kind)
        return over_all(self.classes, self.present, self.space(z) @ self.weights.T + self.bias)

    def space(self, z: Features) -> Features:
        """φ(z), float32 [n, d]."""
        return direction(z) if self.directed else z

    def over_all(self) -> tuple[Features, Features]:
        """weights [C, d] and bias [C] for all classes; the bias of an excluded one is -inf."""
        weights = np.zeros((self.classes, self.weights.shape[1]), np.float32)
        bias = np.full(self.classes, -np.inf, np.float32)
        weights[self.present], bias[self.present] = self.weights, self.bias
        return weights, bias

    def graph(self, graph: Graph, z: str) -> str:
        u = graph.direction(z) if self.directed else z
        return graph.scattered(u, self.weights, self.bias, self.present, self.classes)


@final
@dataclass(frozen=True, eq=False)
class Fleet(Adapted):
    """The fleet's head on features, adapted to a device's labels, of which there may be none."""

    kind: ClassVar[str] = "fleet"
    directed: ClassVar[bool] = False


@final
@dataclass(frozen=True, eq=False)
class FleetCosine(Adapted):
    """The fleet's head on directions of features, adapted to a device's labels, of which there may be none."""

    kind: ClassVar[str] = "fleet-cosine"
    directed: ClassVar[bool] = True


KINDS: dict[str, type[Head]] = {Fleet.kind: Fleet, FleetCosine.kind: FleetCosine}


def received(data: TrainingSet) -> FleetHead | None:
    """The fleet's head of the release of `data`; None for a release without one.

    Classes that were appended after it was made are unknown to it. Raises ArtefactError for an extra that does not fit.
    """
    plan, classes, dim = data.plan, data.classes, data.z.shape[1]
    if not plan.fleet:
        return None
    arrays = data.extras.get(plan.fleet, {})
    if plan.fleet == prior.PRIOR:
        return _of_statistics(data, arrays)
    if arrays.keys() == {"mean", "count"}:
        means = arrays["mean"]
        arrays = {"weight": means, "bias": -0.5 * np.square(means.astype(np.float64)).sum(axis=-1)}
    weight, bias = arrays.get("weight"), arrays.get("bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != dim or not 0 < len(weight) <= classes:
        raise _unfit(plan.fleet, arrays, f"weight [{classes}, {dim}]")
    if bias is None:
        bias = np.zeros(len(weight))
    shares = np.asarray(plan.shares, np.float64)
    if bias.shape != weight.shape[:1] or len(shares) not in (0, len(weight)):
        raise _unfit(plan.fleet, arrays, f"weight [{classes}, {dim}], bias and class shares [{classes}]")
    spread, certainty = arrays.get("spread", np.ones(dim)), arrays.get("factor", np.ones(1))
    fits = (spread.shape, certainty.shape) == ((dim,), (1,)) and 0 < certainty[0] <= 1
    if not fits or not all(np.isfinite(each).all() for each in (weight, bias, spread)):
        raise _unfit(
            plan.fleet, arrays, f"finite numbers, spread [{dim}] and a factor up to 1, if there are any"
        )
    factor = 1.0
    if plan.fleet != FLEET:
        factor = plan.times * (float(data.extras[SCALE]["s"]) if SCALE in data.extras else 1.0)
    more = classes - len(weight)
    if not len(shares):
        shares = np.ones(len(weight))
    known = np.pad(shares > 0, (0, more))
    floor = shares.sum() / len(shares) / 10
    shares = np.pad(np.maximum(shares, floor), (0, more), constant_values=floor)
    weights = np.pad(factor * weight.astype(np.float64), ((0, more), (0, 0)))
    lowest = float(bias.min()) * factor if more else 0.0
    padded = np.pad(factor * bias.astype(np.float64), (0, more), constant_values=lowest)
    shares, spread = shares / shares.sum(), np.maximum(spread.astype(np.float64), 1e-6)
    return FleetHead(
        weights, padded, shares, False, known, np.zeros(dim), np.inf, spread, float(certainty[0])
    )


def nothing(data: TrainingSet, unused: FleetHead | None = None) -> FleetHead:
    """A head that knows no class, in the space of `unused`, or else in that of the release's own heads."""
    classes, directed = data.classes, unused.directed if unused else data.plan.way == "cosine"
    zero, uniform = np.zeros((classes, data.z.shape[1])), np.full(classes, 1 / classes)
    return FleetHead(zero, np.zeros(classes), uniform, directed, np.zeros(classes, bool), zero[0])


def discriminant(means: Doubles, covariance: Doubles, shrinkage: float = 1.0) -> tuple[Doubles, Doubles]:
    """The linear discriminant of class means [C, d] and one covariance within classes [d, d] -> weights [C, d], bias [C].

    shrinkage: share of the mean variance that is added to every variance. The logits are the logarithms of class probabilities for equal
    class shares, up to a constant. Shrinkage makes them flatter than the covariance alone, which the factor takes back in part.
    """
    shrunk = covariance + shrinkage * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    weights = np.sqrt(1 + shrinkage) * np.linalg.solve(shrunk, means.T).T
    return weights, -0.5 * (weights * means).sum(axis=1)


def _of_statistics(data: TrainingSet, arrays: Mapping[str, Array]) -> FleetHead:
    try:
        found = prior.received(arrays, data.classes, data.z.shape[1])
    except StatisticsError as error:
        raise _unfit(prior.PRIOR, arrays, error.message) from error
    given = prior.discriminant(found, direction(data.z).astype(np.float64), data.y)
    uniform = np.full(data.classes, 1 / data.classes)
    return FleetHead(given.weights, given.bias, uniform, True, given.known, given.centre, given.pictures)


def _unfit(name: str, arrays: Mapping[str, Array], expected: str) -> ArtefactError:
    shown = ", ".join(f"{key} {list(array.shape)}" for key, array in arrays.items()) or "nothing"
    return ArtefactError(
        f"fleet's head {name!r}: {shown}, expected {expected}",
        Failure.MANIFEST,
        consequence="no head was fitted",
    )
