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
from edge_fl.learn.network.masked_norm import padding
from edge_fl.learn.objective import CrossEntropy
from edge_fl.learn.optimiser import Gradients, Leaves, Optimiser, dense
from edge_fl.learn.tree import Parts

P = TypeVar("P")  # Params or Parts
C = TypeVar("C")
S = TypeVar("S")  # what a loss tells beside its value
Loss = Callable[[Any, Batch], Tensor]  # (params, batch) -> scalar
Trained = tuple[tuple[Parts, Any], ...]  # (parts, the state of their optimiser), as often as there are such


def fit(loss: Loss, params: P, data: Batches, *, stage: str, epochs: int, optimiser: Optimiser) -> P:
    """`params` (Params or Parts) after `epochs` over `data`; a fresh optimiser state (METHODS.md G8); the input is untouched."""
    return fit_from(
        optimiser.init(tree.parameters(params)),
        loss,
        params,
        data,
        stage=stage,
        epochs=epochs,
        optimiser=optimiser,
    )[0]


def fit_from(
    state: Any, loss: Loss, params: P, data: Batches, *, stage: str, epochs: int, optimiser: Optimiser
) -> tuple[P, Any]:
    """As `fit`, from a given optimiser state; returns the new state too (for methods whose clients keep it)."""

    def step(carry: tuple[P, Any], batch: Batch) -> tuple[P, Any]:
        params, state = carry
        optimiser.advance(tree.parameters(params), factored_gradient(loss, params, batch), state)
        return carry

    return scan(step, (params, state), data, stage=stage, epochs=epochs, norm=tree.has_buffers(params))


def fit_measuring(
    loss: Callable[[Any, Batch], tuple[Tensor, tuple[Tensor, Tensor]]],
    params: P,
    data: Batches,
    *,
    stage: str,
    epochs: int,
    optimiser: Optimiser,
) -> tuple[P, tuple[Tensor, Tensor]]:
    """As `fit`, for a loss that returns (scalar, (number, weight)); the numbers' weighted mean over all batches, and their weight."""

    def step(carry: tuple[P, Any, Tensor, Tensor], batch: Batch) -> tuple[P, Any, Tensor, Tensor]:
        params, state, total, weights = carry
        grads, (number, weight) = measured_gradient(loss, params, batch)
        optimiser.advance(tree.parameters(params), grads, state)
        return params, state, total + number * weight, weights + weight

    zero = torch.zeros((), device=data.x.device)
    carry = (params, optimiser.init(tree.parameters(params)), zero, zero)
    params, _, total, weights = scan(
        step, carry, data, stage=stage, epochs=epochs, norm=tree.has_buffers(params)
    )
    return params, (total / weights.clamp(min=1), weights)


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

    It works on a copy, so that nobody else sees what `step` changes in place. `norm` says that BatchNorm trains in it, so that
    short tails are merged.
    """
    carry = tree.map(data.copy, carry)
    for batch in islice(data.batches(stage, epochs, norm=norm), limit or None):
        if batch.active is None:
            carry = step(carry, batch)
        else:  # steps move tensors in place, so what an idle client keeps is set aside first
            before = tree.clone(carry)
            carry = tree.where(batch.active, step(carry, batch), before)
    return tree.map(lambda t: t.detach().contiguous(), carry)


def descend(loss: Loss, params: P, state: Any, batch: Batch, optimiser: Optimiser) -> tuple[P, Any]:
    """One optimiser step on one batch -> (params, state). BatchNorm buffers inside `params` move in place."""
    return _stepped(params, gradient(loss, params, batch), state, optimiser)


def descend_together(loss: Loss, several: Trained, batch: Batch, optimiser: Optimiser) -> Trained:
    """As `descend` by one loss of all their parts together, while each keeps an optimiser's state of its own."""
    grads = gradient(loss, tree.merge(*(parts for parts, _ in several)), batch)
    return tuple(
        _stepped(parts, {path: grads[path] for path in tree.parameters(parts)}, state, optimiser)
        for parts, state in several
    )


def _stepped(params: P, grads: Leaves, state: Any, optimiser: Optimiser) -> tuple[P, Any]:
    stepped, state = optimiser.step(tree.parameters(params), grads, state)
    return tree.replaced(params, stepped), state


def gradient(loss: Loss, params: Any, batch: Batch) -> Leaves:
    """d loss / d params for every trainable leaf; zero where the loss does not depend on it."""
    return dense(factored_gradient(loss, params, batch))


def factored_gradient(loss: Loss, params: Any, batch: Batch) -> Gradients:
    """`gradient` as the loss knows it, which an optimiser may add faster, or else by autograd."""
    known = loss.gradient(params, batch) if isinstance(loss, CrossEntropy) else None
    return known or measured_gradient(lambda p, b: (loss(p, b), ()), params, batch)[0]


def measured_gradient(
    loss: Callable[[Any, Batch], tuple[Tensor, S]], params: Any, batch: Batch
) -> tuple[Leaves, S]:
    """As `gradient`, for a loss that returns (scalar, a tree of what else the forward pass should tell); (gradient, that tree)."""
    if batch.vectorised:
        return _vectorised_gradient(loss, params, batch)
    held = {path: t.detach().requires_grad_() for path, t in tree.parameters(params).items()}
    with torch.enable_grad():
        value, told = loss(tree.replaced(params, held), batch)
    told = tree.map(Tensor.detach, told)
    if not value.requires_grad:
        return {path: torch.zeros_like(t) for path, t in held.items()}, told
    grads = torch.autograd.grad(value, list(held.values()), allow_unused=True)
    both = zip(held.items(), grads, strict=True)
    return {path: torch.zeros_like(t) if g is None else g for (path, t), g in both}, told


def _vectorised_gradient(
    loss: Callable[[Any, Batch], tuple[Tensor, S]], params: Any, batch: Batch
) -> tuple[Leaves, S]:
    """`measured_gradient` under vmap, where torch.autograd.grad does not go; BatchNorm leaves padding out."""
    leaves = tree.leaves(params)
    held = tree.parameters(params)
    fixed = {path: t for path, t in leaves.items() if path not in held}

    def value(trained: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, S]:
        now = dict(zip((*held, *fixed), (*trained, *others), strict=True))
        with padding(batch.mask):
            return loss(tree.replaced(params, now), batch)

    grads, told = torch.func.grad(value, has_aux=True)(tuple(held.values()), tuple(fixed.values()))
    return dict(zip(held, grads, strict=True)), tree.map(Tensor.detach, told)
