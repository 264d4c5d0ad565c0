"""Robust aggregation for any method: coordinate-wise median and trimmed mean, geometric median, and clipping.

Updates are replaced before the method's `aggregate`. Clipping streams. The others need the whole cohort in memory and give every client the
same values, which removes the differences between clients that some methods use (FedAMP), and their sample counts. Integer buffers and
tensors of different shapes (class means) stay unchanged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Params, Parts

Centre = Callable[[Tensor], Tensor]
"""Values of one tensor by client, [K, ...] -> one [...]."""


@dataclass(frozen=True)
class Robust:
    """`centre`: "mean" (the method's own), "median", "trimmed" without the share `trim` at each end of every coordinate, or "geometric".

    `clip` above 0: the largest L2 norm of one client's change to one part.
    """

    centre: str = "mean"
    trim: float = 0.1
    clip: float = 0.0


def robust(updates: Iterable[Update], shared: Parts, how: Robust) -> Iterator[Update]:
    """The updates for the method's `aggregate`. Raises KeyError for an unknown centre."""
    clipped = (clip(update, shared, how.clip) for update in updates) if how.clip else iter(updates)
    return clipped if how.centre == "mean" else centred(clipped, CENTRES[how.centre](how))


def median(values: Tensor) -> Tensor:
    """Median over clients per coordinate, [K, ...] -> [...]; for even K the mean of the two middle values."""
    ordered, clients = values.sort(0).values, len(values)
    return (ordered[(clients - 1) // 2] + ordered[clients // 2]) / 2


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """Mean over clients per coordinate without the max(floor(trim * K), 1) smallest and largest values, [K, ...] -> [...].

    A part that only one or two clients sent cannot be trimmed: their mean.
    """
    cut = min(max(int(trim * len(values)), 1), (len(values) - 1) // 2)
    return values.sort(0).values[cut : len(values) - cut].mean(0)


def geometric_median(values: Tensor, steps: int = 32) -> Tensor:
    """The point with the smallest sum of distances to the clients' values, [K, ...] -> [...].

    Smoothed Weiszfeld algorithm from the coordinate-wise median (Pillutla et al., "Robust Aggregation for Federated Learning", IEEE TSP
    2022, Algorithm 2).
    """
    points = values.flatten(1)
    centre = median(points)
    for _ in range(steps):
        distances = (points - centre).norm(dim=1)
        weights = 1.0 / distances.clamp(min=float(distances.median()) * 1e-6 + 1e-30)
        centre = weights @ points / weights.sum()
    return centre.view(values.shape[1:])


CENTRES: dict[str, Callable[[Robust], Centre]] = {
    "median": lambda how: median,
    "trimmed": lambda how: partial(trimmed_mean, trim=how.trim),
    "geometric": lambda how: geometric_median,
}


def centred(updates: Iterable[Update], centre: Centre) -> Iterator[Update]:
    """Replace each tensor that all updates hold with equal shape by the centre over the updates."""
    cohort = list(updates)
    middle = {
        name: _middle([update.parts[name] for update in cohort if name in update.parts], centre)
        for name in dict.fromkeys(name for update in cohort for name in update.parts)
    }
    for update in cohort:
        yield replace(update, parts={name: {**p, **middle[name]} for name, p in update.parts.items()})


def clip(update: Update, shared: Parts, bound: float) -> Update:
    """Scale down the change of each part against the server's (0 where it has none) to L2 norm `bound`."""
    return replace(
        update, parts={name: _clipped(p, shared.get(name, {}), bound) for name, p in update.parts.items()}
    )


def _middle(sent: Sequence[Params], centre: Centre) -> Params:
    return {
        name: centre(torch.stack([params[name] for params in sent]).double()).to(tensor.dtype)
        for name, tensor in sent[0].items()
        if tensor.is_floating_point()
        and all(name in params and params[name].shape == tensor.shape for params in sent)
        and "count" not in sent[0]  # class means: absent classes must not contribute
    }


def _clipped(params: Params, before: Params, bound: float) -> Params:
    changes = {
        name: tensor.double() - (before[name].double() if _alike(before.get(name), tensor) else 0.0)
        for name, tensor in params.items()
        if tensor.is_floating_point()
    }
    length = (
        torch.stack([change.square().sum() for change in changes.values()]).sum().sqrt() if changes else 0
    )
    if length <= bound:
        return params
    factor = bound / length
    return {
        name: (tensor.double() - (1 - factor) * changes[name]).to(tensor.dtype) if name in changes else tensor
        for name, tensor in params.items()
    }


def _alike(before: Tensor | None, tensor: Tensor) -> bool:
    return before is not None and before.shape == tensor.shape
