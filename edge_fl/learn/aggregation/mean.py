"""What clients send and how it is averaged: streaming, in float64, exact where exactness is possible (METHODS.md G4, G5).

Sums run over n_i * x_i with whole n_i, so one upload gives its exact copy and equal uploads their exact value; the caller feeds
updates in ascending client id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edge_fl.learn.batches import Batches
from edge_fl.learn.losses import one_hot
from edge_fl.learn.tree import Params, Parts

PROTOTYPES = "prototypes"  # the part that holds class means, {"mean": [C, d], "count": [C]}


@dataclass(frozen=True)
class Update:
    """One client's upload of one round: its parts, its number of training samples, and what it measured.

    A late one began `staleness` rounds ago, from `start`, which the server has replaced since (`edge_fl.learn.aggregation.staleness`).
    """

    client: str
    samples: int
    parts: Parts
    metrics: dict[str, float] = field(default_factory=dict)
    start: Parts | None = None
    staleness: int = 0


class Mean:
    """A weighted mean of Params that holds one float64 sum, however many are added; integer buffers take their maximum."""

    def __init__(self) -> None:
        self._sums: Params = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.weight = 0.0

    def add(self, params: Params, weight: float) -> None:
        """Adds one upload; all must have the same names."""
        self.weight += weight
        for name, tensor in params.items():
            if not tensor.is_floating_point():
                self._sums[name] = (
                    torch.maximum(self._sums[name], tensor) if name in self._sums else tensor.clone()
                )
            elif name in self._sums:
                self._sums[name].add_(tensor, alpha=weight)  # widened on the way, without a copy
            else:
                self._sums[name] = tensor.to(torch.float64) * weight
            self._dtypes[name] = tensor.dtype

    def value(self) -> Params | None:
        """The mean in the uploads' dtype; None when nothing (or only weight 0) was added."""
        if self.weight == 0:
            return None
        return {
            n: (s / self.weight).to(self._dtypes[n]) if s.is_floating_point() else s
            for n, s in self._sums.items()
        }


def weighted_mean(
    shared: Parts, updates: Iterable[Update], *, uniform: bool = False, by_count: bool = True
) -> Parts:
    """Every part averaged over the updates that hold it, weighted by samples (or equally); parts that nobody sent stay as they are.

    The part "prototypes" is averaged class by class, weighted `by_count` or equally over the classes' owners.
    """
    means: dict[str, Mean] = {}
    classes = PrototypeMean(by_count=by_count)
    for update in updates:
        for name, params in update.parts.items():
            if name == PROTOTYPES:
                classes.add(params)
            else:
                means.setdefault(name, Mean()).add(params, 1 if uniform else update.samples)
    shared = {**shared, PROTOTYPES: classes.value(shared[PROTOTYPES])} if PROTOTYPES in shared else shared
    averaged = {name: value for name, mean in means.items() if (value := mean.value()) is not None}
    return {**shared, **averaged}


def mixture(uploads: Iterable[Params], weights: Iterable[float]) -> Params:
    """Uploads of equal names added up by weights of sum 1; those of weight 0 are left out."""
    mean = Mean()
    for params, weight in zip(uploads, weights, strict=True):
        if weight > 0:
            mean.add(params, float(weight))
    return mean.value() or {}


def lerp(old: Params, new: Params, keep: float | Tensor) -> Params:
    """keep * old + (1 - keep) * new, literally, so that keep = 1 leaves every bit of old (F13); integer buffers are taken from new."""
    return {n: keep * t + (1.0 - keep) * new[n] if t.is_floating_point() else new[n] for n, t in old.items()}


def prototypes(features: Batches) -> Params:
    """Class means of features z [N, d] -> {"mean": [C, d], "count": [C]}; absent classes are 0 (F12, FedProto Eq. 6)."""
    member = one_hot(features.y, features.classes)
    count = member.sum(0)
    return {"mean": member.T @ features.x / count.clamp(min=1)[:, None], "count": count}


def spread(features: Batches) -> Params:
    """How features z [N, d] lie around their classes: V [] and H [C, d] with H[c] = π_c μ_c (FedPAC)."""
    known, number = prototypes(features), (features.y >= 0).sum()  # a label below 0 is padding
    h = known["count"][:, None] * known["mean"] / number
    squared = torch.where(features.y >= 0, (features.x**2).sum(1), 0.0).sum() / number
    return {"V": ((squared - (h**2).sum()) / number).clamp(min=0), "H": h}


def no_prototypes(classes: int, dim: int) -> Params:
    """What the server knows before anybody has reported: every class is absent."""
    return {"mean": torch.zeros(classes, dim), "count": torch.zeros(classes)}


def only_owned(prototypes: Params) -> Params:
    """Prototypes as they travel: `mean` [C_i, d] has rows for the classes whose `count` [C] is not 0 and no others."""
    return {"mean": prototypes["mean"][prototypes["count"] > 0], "count": prototypes["count"]}


def with_absent(prototypes: Params) -> Params:
    """The inverse of `only_owned`; prototypes that have all rows already stay as they are."""
    mean, count = prototypes["mean"], prototypes["count"]
    if len(mean) == len(count):
        return prototypes
    return {
        "mean": mean.new_zeros(len(count), mean.shape[1]).index_put((count.nonzero()[:, 0],), mean),
        "count": count,
    }


class PrototypeMean:
    """Class-wise mean of clients' prototypes, weighted by their counts or equally; never-seen classes keep the old value (G15)."""

    def __init__(self, *, by_count: bool = True) -> None:
        self._by_count = by_count
        self._sum: Tensor | None = None
        self._weight: Tensor | None = None

    def add(self, prototypes: Params) -> None:
        """Adds {"mean": [C, d], "count": [C]}, or `only_owned` of it."""
        prototypes = with_absent(prototypes)
        weight = prototypes["count"].to(torch.float64)
        weight = weight if self._by_count else (weight > 0).to(torch.float64)
        total = prototypes["mean"].to(torch.float64) * weight[:, None]
        self._sum = total if self._sum is None else self._sum + total
        self._weight = weight if self._weight is None else self._weight + weight

    def value(self, old: Params) -> Params:
        """{"mean", "count"}; `count` is the weight behind each mean, 0 where a class has never been seen."""
        if self._sum is None or self._weight is None:
            return old
        seen = self._weight > 0
        mean = (self._sum / self._weight.clamp(min=1e-300)[:, None]).to(old["mean"].dtype)
        return {
            "mean": torch.where(seen[:, None], mean, old["mean"]),
            "count": torch.where(seen, self._weight.to(old["count"].dtype), old["count"]),
        }
