"""The one batch loop of the project: `scan` carries a state through a stage's batches, `fit` is the usual step inside it.

`fit(loss, params, data, ...)` trains `params` alone; whatever else `loss` closes over is fixed. A method with an unusual step (two
optimisers, an inner loop, clipped weights) gives its own pure step to `scan` and uses `gradient` and an optimiser in it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.optimiser import Leaves, Optimiser

P = TypeVar("P")  # Params or Parts
C = TypeVar("C")
Loss = Callable[[Any, Batch], Tensor]  # (params, batch) -> scalar


def fit(loss: Loss, params: P, data: Batches, *, stage: str, epochs: int, optimiser: Optimiser) -> P:
    """`params` (Params or Parts) after `epochs` over `data`; a fresh optimiser state (METHODS.md G8); the input is untouched."""
    return fit_from(optimiser.init(tree.parameters(params)), loss, params, data, stage=stage, epochs=epochs, optimiser=optimiser)[0]


def fit_from(
    state: Any, loss: Loss, params: P, data: Batches, *, stage: str, epochs: int, optimiser: Optimiser
) -> tuple[P, Any]:
    """As `fit`, from a given optimiser state; returns the new state too (for methods whose clients keep it)."""

    def step(carry: tuple[P, Any], batch: Batch) -> tuple[P, Any]:
        return descend(loss, *carry, batch, optimiser)

    return scan(step, (params, state), data, stage=stage, epochs=epochs, norm=tree.has_buffers(params))


def scan(
    step: Callable[[C, Batch], C],
    carry: C,
    data: Batches,
    *,
    stage: str,
    epochs: int,
    norm: bool = False,
    limit: int = 0,
) -> C:
    """Carries `carry` (a tree) through the batches of a stage, the first `limit` of them unless that is 0.

    `norm` says that BatchNorm trains in it, so that short tails are merged.
    """
    carry = tree.clone(carry)
    for batch in islice(data.batches(stage, epochs, norm=norm), limit or None):
        carry = step(carry, batch)
    return tree.map(Tensor.detach, carry)


def settled(flag: Tensor) -> bool:
    """Whether a flag is known to be set, so that the rest of a stage can be left out. Never under vmap, where it differs by client."""
    return not torch._C._functorch.is_batchedtensor(flag) and bool(flag > 0)


def descend(loss: Loss, params: P, state: Any, batch: Batch, optimiser: Optimiser) -> tuple[P, Any]:
    """One optimiser step on one batch -> (params, state). BatchNorm buffers inside `params` move in place."""
    stepped, state = optimiser.step(tree.parameters(params), gradient(loss, params, batch), state)
    return tree.replaced(params, stepped), state


def gradient(loss: Loss, params: Any, batch: Batch) -> Leaves:
    """d loss / d params for every trainable leaf; zero where the loss does not depend on it."""
    held = {path: t.detach().requires_grad_() for path, t in tree.parameters(params).items()}
    with torch.enable_grad():
        value = loss(tree.replaced(params, held), batch)
    if not value.requires_grad:
        return {path: torch.zeros_like(t) for path, t in held.items()}
    grads = torch.autograd.grad(value, list(held.values()), allow_unused=True)
    return {path: torch.zeros_like(t) if g is None else g for (path, t), g in zip(held.items(), grads, strict=True)}
