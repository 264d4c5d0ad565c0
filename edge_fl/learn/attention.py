"""Attention between clients' models (FedAMP): who learns how much from whom, and the mixtures that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Mean
from edge_fl.learn.losses import unit
from edge_fl.learn.optimiser import Leaves
from edge_fl.learn.tree import Parts


def vectors(models: Sequence[Parts]) -> Tensor:
    """The parameters of each model in one float64 row, [n, D]; running statistics are left out."""
    return torch.stack([_vector(tree.parameters(model)) for model in models])


def by_distance(models: Tensor, alpha: float, sigma: float) -> Tensor:
    """FedAMP's weights [n, n] of models [n, D]: alpha/sigma * exp(-squared distance / sigma) to others, the rest to oneself.

    Rows add up to 1; where the others would get more than that together, they are scaled down to it (METHODS.md 4.14).
    """
    squared = torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    others = _off_diagonal(models) * (alpha / sigma) * torch.exp(-squared / sigma)
    return _completed(others / others.sum(1, keepdim=True).clamp(min=1))


def by_cosine(models: Tensor, own: float, scale: float) -> Tensor:
    """HeurFedAMP's weights [n, n]: `own` to oneself, the rest to others in proportion to exp(scale * cosine)."""
    directions = unit(models)
    others = _off_diagonal(models) * torch.exp(scale * (directions @ directions.T))
    return _completed((1 - own) * others / others.sum(1, keepdim=True).clamp(min=1e-300))


def mixtures(models: Sequence[Parts], weights: Tensor) -> Iterator[Parts]:
    """One weighted mean of all models per row of `weights` [n, n], running statistics included."""
    for row in weights.tolist():
        means = {name: Mean() for name in models[0]}
        for model, weight in zip(models, row, strict=True):
            for name, mean in means.items():
                mean.add(model[name], weight)
        yield {name: value for name, mean in means.items() if (value := mean.value()) is not None}


def _vector(leaves: Leaves) -> Tensor:
    return torch.cat([leaves[path].flatten() for path in sorted(leaves)]).to(torch.float64)


def _off_diagonal(models: Tensor) -> Tensor:
    return 1 - torch.eye(len(models), dtype=models.dtype, device=models.device)


def _completed(others: Tensor) -> Tensor:
    return others + torch.diag(1 - others.sum(1))
