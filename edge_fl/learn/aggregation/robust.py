"""Aggregation that a few wrong updates cannot pull away: median and trimmed mean per coordinate, and clipping, for any method.

A cohort's updates are replaced by safer ones before the method's own `aggregate` sees them. Clipping looks at one update at a time and
streams; median and trimmed mean need the whole cohort in memory, give every client the same centre, and so take away what a method
makes of the differences between clients (FedAMP). Integer buffers and parts of differing shapes (class means) stay each client's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """`centre` is "mean" (the method's own), "median" or "trimmed", which leaves out the share `trim` at each end of every coordinate.

    `clip` above 0 is the largest L2 norm of the change that one client may make to one part.
    """

    centre: str = "mean"
    trim: float = 0.1
    clip: float = 0.0


def robust(updates: Iterable[Update], shared: Parts, how: Robust) -> Iterator[Update]:
    """The updates as the method's aggregate is to see them."""
    clipped = (clip(update, shared, how.clip) for update in updates) if how.clip else iter(updates)
    centre = centres(how.trim).get(how.centre)
    return centred(clipped, centre) if centre else clipped


def centres(trim: float) -> Mapping[str, Centre]:
    """Every centre but the mean, by name."""
    return {"median": median, "trimmed": partial(trimmed_mean, trim=trim)}


def median(values: Tensor) -> Tensor:
    """The median over clients of each coordinate, [K, ...] -> [...]; between the two middle ones for an even K."""
    ordered, clients = values.sort(0).values, len(values)
    return (ordered[(clients - 1) // 2] + ordered[clients // 2]) / 2


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean over clients of each coordinate without the floor(trim * K) smallest and largest, [K, ...] -> [...]."""
    cut = min(int(trim * len(values)), (len(values) - 1) // 2)
    return values.sort(0).values[cut : len(values) - cut].mean(0)


def centred(updates: Iterable[Update], centre: Centre) -> Iterator[Update]:
    """Every update with the centre of all in the place of its own values, in each tensor that all hold alike."""
    cohort = list(updates)
    middle = {
        name: _middle([update.parts[name] for update in cohort if name in update.parts], centre)
        for name in dict.fromkeys(name for update in cohort for name in update.parts)
    }
    for update in cohort:
        yield replace(update, parts={name: {**p, **middle[name]} for name, p in update.parts.items()})


def clip(update: Update, shared: Parts, bound: float) -> Update:
    """The update with each part at most `bound` away from the server's, in L2 norm; a part that the server does not have, from 0."""
    return replace(
        update, parts={name: _clipped(p, shared.get(name, {}), bound) for name, p in update.parts.items()}
    )


def _middle(sent: Sequence[Params], centre: Centre) -> Params:
    return {
        name: centre(torch.stack([params[name] for params in sent]).double()).to(tensor.dtype)
        for name, tensor in sent[0].items()
        if tensor.is_floating_point()
        and all(name in params and params[name].shape == tensor.shape for params in sent)
        and "count" not in sent[0]  # class means: a class that a client does not have is no vote
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
