"""Updates and their weighted mean: streaming, summed in float64 (docs/methods.md G4, G5).

Sums are over n_i * x_i with integer n_i, so that the mean of one update, or of equal updates, is exact. Updates come sorted by client id.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edge_fl.learn.batches import Batches
from edge_fl.learn.losses import one_hot
from edge_fl.learn.tree import Params, Parts, buffers, leaves

PROTOTYPES = "prototypes"  # the part of class means, {"mean": [C, d], "count": [C]}


@dataclass(frozen=True)
class Update:
    """One client's update of one round: its parts, its number of training samples, and its metrics.

    A late update began `staleness` rounds ago from `start`, an older broadcast (`edge_fl.learn.aggregation.staleness`). `seconds` is the
    processor time of its training, without evaluation; 0: not measured.
    """

    client: str
    samples: int
    parts: Parts
    metrics: dict[str, float] = field(default_factory=dict)
    start: Parts | None = None
    staleness: int = 0
    seconds: float = 0.0


class Mean:
    """Streaming weighted mean of Params in one float64 sum; of integer buffers the maximum."""

    def __init__(self) -> None:
        self._sums: Params = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.weight = 0.0

    def add(self, params: Params, weight: float) -> None:
        """Add Params; all must have the same names."""
        self.weight += weight
        for name, tensor in params.items():
            if not tensor.is_floating_point():
                self._sums[name] = (
                    torch.maximum(self._sums[name], tensor) if name in self._sums else tensor.clone()
                )
            elif name in self._sums:
                self._sums[name].add_(tensor, alpha=weight)  # converts to float64 without a copy
            else:
                self._sums[name] = tensor.to(torch.float64) * weight
            self._dtypes[name] = tensor.dtype

    def value(self) -> Params | None:
        """The mean in the original dtype; None if the weights sum to 0."""
        if self.weight == 0:
            return None
        return {
            n: (s / self.weight).to(self._dtypes[n]) if s.is_floating_point() else s
            for n, s in self._sums.items()
        }


def weighted_mean(
    shared: Parts, updates: Iterable[Update], *, uniform: bool = False, by_count: bool = True
) -> Parts:
    """Average each part over the updates that contain it, weighted by samples or equally (`uniform`); other parts stay.

    The part "prototypes" is averaged per class, weighted by samples (`by_count`) or equally over the clients that have the class.
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
    """Sum of Params with weights of sum 1; those of weight 0 are skipped."""
    mean = Mean()
    for params, weight in zip(uploads, weights, strict=True):
        if weight > 0:
            mean.add(params, float(weight))
    return mean.value() or {}


def lerp(old: Params, new: Params, keep: float | Tensor) -> Params:
    """keep * old + (1 - keep) * new, as written, so that keep = 1 preserves all bits of old (F13); integer buffers from new."""
    return {n: keep * t + (1.0 - keep) * new[n] if t.is_floating_point() else new[n] for n, t in old.items()}


def stepped(old: Params, mean: Params, size: float) -> Params:
    """The server's step from old towards the mean, old + size (mean - old); beyond the mean for a size above 1.

    Running statistics reach the mean at most, because a larger step may make a variance negative.
    """
    # without BatchNorm that stays on the clients
    old = {name: t for name, t in old.items() if name in mean}
    return {**lerp(old, mean, 1 - size), **lerp(buffers(old), mean, max(1 - size, 0.0))}


def noted(updates: Iterable[Update], clients: list[str]) -> Iterator[Update]:
    """The updates as they are; `clients` gets the id of each as it passes."""
    for update in updates:
        clients.append(update.client)
        yield update


def remembered(counted: Params, clients: Iterable[str], like: Parts) -> Params:
    """The server's memory of the clients that took part, a scalar each, with more clients; on the device of `like`."""
    device = next(iter(leaves(like).values())).device
    return {**counted, **{client: torch.ones((), device=device) for client in clients}}


def prototypes(features: Batches) -> Params:
    """Class means of features z [N, d] -> {"mean": [C, d], "count": [C]}; absent classes are 0 (F12, FedProto Eq. 6)."""
    member = one_hot(features.y, features.classes)
    count = member.sum(0)
    return {"mean": member.T @ features.x / count.clamp(min=1)[:, None], "count": count}


def no_prototypes(classes: int, dim: int) -> Params:
    """Prototypes with every class absent."""
    return {"mean": torch.zeros(classes, dim), "count": torch.zeros(classes)}


def only_owned(prototypes: Params) -> Params:
    """Prototypes for transport: `mean` [C_i, d] only has rows for classes whose `count` [C] is not 0."""
    return {"mean": prototypes["mean"][prototypes["count"] > 0], "count": prototypes["count"]}


def with_absent(prototypes: Params) -> Params:
    """The inverse of `only_owned`; prototypes with all rows are returned unchanged."""
    mean, count = prototypes["mean"], prototypes["count"]
    if len(mean) == len(count):
        return prototypes
    return {
        "mean": mean.new_zeros(len(count), mean.shape[1]).index_put((count.nonzero()[:, 0],), mean),
        "count": count,
    }


class PrototypeMean:
    """Mean of prototypes per class, weighted by counts or equally; classes without reports keep the old value (docs/methods.md G15)."""

    def __init__(self, *, by_count: bool = True) -> None:
        self._by_count = by_count
        self._sum: Tensor | None = None
        self._weight: Tensor | None = None

    def add(self, prototypes: Params) -> None:
        """Add {"mean": [C, d], "count": [C]}, or `only_owned` of it."""
        prototypes = with_absent(prototypes)
        weight = prototypes["count"].to(torch.float64)
        weight = weight if self._by_count else (weight > 0).to(torch.float64)
        total = prototypes["mean"].to(torch.float64) * weight[:, None]
        self._sum = total if self._sum is None else self._sum + total
        self._weight = weight if self._weight is None else self._weight + weight

    def value(self, old: Params) -> Params:
        """{"mean", "count"}; `count` is the sum of weights per class, 0 for a class that was never reported."""
        if self._sum is None or self._weight is None:
            return old
        seen = self._weight > 0
        mean = (self._sum / self._weight.clamp(min=1e-300)[:, None]).to(old["mean"].dtype)
        return {
            "mean": torch.where(seen[:, None], mean, old["mean"]),
            "count": torch.where(seen, self._weight.to(old["count"].dtype), old["count"]),
        }
