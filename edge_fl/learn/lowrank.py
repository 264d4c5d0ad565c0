"""Matrices as products of two thin ones: what FedKD sends instead of whole updates (METHODS.md F10; Wu et al. 2022).

A convolution counts as the matrix [out, rest]. Whatever would not get smaller travels as it is: vectors, and matrices of high rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Mean, Update
from edge_fl.learn.tree import Params, Parts

LEFT, RIGHT = "~left", "~right"


def rank(singular: Tensor, energy: float) -> int:
    """The smallest K >= 1 such that the first K singular values (descending) hold `energy` of the sum of their squares."""
    held = (singular.to(torch.float64) ** 2).cumsum(0)
    return 1 + int((held < energy * held[-1]).sum())


def factorised(params: Params, energy: float) -> Params:
    """Each matrix [o, r] of rank K by energy as ``name~left`` [o, K] and ``name~right`` [K, r], where that is less to send."""
    thin: Params = {}
    for name, tensor in params.items():
        factors = _factors(tensor.flatten(1), energy) if tensor.ndim > 1 else ()
        small = sum(factor.numel() for factor in factors) < tensor.numel()
        thin |= (
            dict(zip((name + LEFT, name + RIGHT), factors, strict=True))
            if factors and small
            else {name: tensor}
        )
    return thin


def multiplied(thin: Params, like: Params) -> Params:
    """The inverse of `factorised`, in the names and shapes of `like`."""
    return {
        name: thin[name] if name in thin else (thin[name + LEFT] @ thin[name + RIGHT]).reshape(tensor.shape)
        for name, tensor in like.items()
    }


def mean(updates: Iterable[Update], part: str, old: Params, energy: float) -> Params:
    """The plain mean of thin uploads of `part`, cut to `energy` as well; `old`, cut, where nobody sent one."""
    total = Mean()
    for update in updates:
        if part in update.parts:
            total.add(multiplied(update.parts[part], old), 1)
    return multiplied(factorised(total.value() or old, energy), old)


def base(params: Parts, compress: str) -> Parts:
    """What a change is added to: the parameters for "update", nothing for "parameters", which travel themselves."""
    return params if compress == "update" else tree.map(torch.zeros_like, params)


def _factors(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    u, singular, v = torch.linalg.svd(matrix, full_matrices=False)
    k = rank(singular, energy)
    return u[:, :k] * singular[:k], v[:k]
