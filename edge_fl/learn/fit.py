"""The one batch loop of the project: `scan` carries a state through a stage's batches; `fit` is gradient descent with it.

`fit(loss, params, data, ...)` trains `params` only; everything else that `loss` closes over is constant. A method with a custom step (two
optimisers, an inner loop, clipped weights) passes a pure step to `scan` and calls `gradient` or `descend` in it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches, as_tensor
from edge_fl.learn.network import stacks
from edge_fl.learn.network.chain import BoundLayer
from edge_fl.learn.network.masked_norm import padding
from edge_fl.learn.objective import CrossEntropy, error
from edge_fl.learn.optimiser import Gradients, Leaves, Optimiser, dense
from edge_fl.learn.stacked import Stacked

P = TypeVar("P")  # Params or Parts
C = TypeVar("C")
A = TypeVar("A")  # a tree of tensors that a loss returns in addition to its value
Loss = Callable[[Any, Batch], Tensor]  # (params, batch) -> scalar


def fit(loss: Loss, params: P, data: Batches, *, stage: str, epochs: int, optimiser: Optimiser) -> P:
    """Train a copy of `params` (Params or Parts) for `epochs` over `data`, with a fresh optimiser state (docs/methods.md G8)."""
    if isinstance(data, Stacked) and isinstance(loss, CrossEntropy) and (layers := loss.layers(params)):  # type: ignore[arg-type]
        augmented = data.augment != "none" and data.x.dim() == 4
        if not augmented and stacks.supported(layers, optimiser, data.x):
            batches = partial(data.stacks, stage, epochs)
            return tree.replaced(params, stacks.fit(layers, optimiser, error, data.x, data.y, batches))  # type: ignore[arg-type]
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
    """As `fit`, from a given optimiser state -> (params, state)."""
    known: tuple[Any, Leaves, Sequence[BoundLayer] | None] = (None, {}, None)

    def step(carry: tuple[P, Any], batch: Batch) -> tuple[P, Any]:
        nonlocal known
        params, state = carry
        if known[0] is not params:  # usually once, because steps change tensors in place
            layers = loss.bind(params) if isinstance(loss, CrossEntropy) else None  # type: ignore[arg-type]
            known = params, tree.parameters(params), layers
        _, held, bound = known
        optimiser.advance(held, factored_gradient(loss, params, batch, bound), state)
        return carry

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
    """Apply `step` to `carry` (a tree) and each batch of a stage -> the last carry.

    `step` may change tensors in place: it gets a copy. `norm`: BatchNorm is trained, so a short last batch is merged. `limit` above 0:
    only so many batches.
    """
    carry = tree.map(data.copy, carry)
    for batch in islice(data.batches(stage, epochs, norm=norm), limit or None):
        if batch.active is None:
            carry = step(carry, batch)
        else:  # a client without a batch here keeps its carry; copied first, because steps change tensors in place
            before = tree.clone(carry)
            carry = tree.where(batch.active, step(carry, batch), before)
    return tree.map(lambda t: as_tensor(t.detach()), carry)


def descend(loss: Loss, params: P, state: Any, batch: Batch, optimiser: Optimiser) -> tuple[P, Any]:
    """One optimiser step on one batch -> (params, state). BatchNorm buffers inside `params` are updated in place."""
    return apply_gradient(params, gradient(loss, params, batch), state, optimiser)


def apply_gradient(params: P, grads: Leaves, state: Any, optimiser: Optimiser) -> tuple[P, Any]:
    """One optimiser step -> (params, state); of `grads` only those of `params` are used."""
    held = tree.parameters(params)
    stepped, state = optimiser.step(held, {path: grads[path] for path in held}, state)
    return tree.replaced(params, stepped), state


def gradient(loss: Loss, params: Any, batch: Batch) -> Leaves:
    """d loss / d params for every trainable leaf; zero where the loss does not depend on it."""
    return dense(factored_gradient(loss, params, batch))


def factored_gradient(
    loss: Loss, params: Any, batch: Batch, bound: Sequence[BoundLayer] | None = None
) -> Gradients:
    """`gradient` in closed form where the loss has one (linear layers as factors), else by autograd; `bound` as in `CrossEntropy`."""
    if isinstance(loss, CrossEntropy):
        return gradient_and_features(loss, params, batch, bound)[0]
    return gradient_and_aux(lambda p, b: (loss(p, b), ()), params, batch)[0]


def gradient_and_features(
    loss: CrossEntropy, params: Any, batch: Batch, bound: Sequence[BoundLayer] | None = None
) -> tuple[Gradients, Tensor]:
    """`factored_gradient`, and the input z [B, d] of the loss's last part, from the same forward pass."""
    return loss.gradient(params, batch, bound) or gradient_and_aux(loss.with_features, params, batch)


def gradient_and_aux(
    loss: Callable[[Any, Batch], tuple[Tensor, A]], params: Any, batch: Batch
) -> tuple[Leaves, A]:
    """As `gradient`, for a loss that returns (scalar, an auxiliary tree) -> (gradient, that tree)."""
    if batch.vectorised:
        return _vectorised_gradient(loss, params, batch)
    held = {path: t.detach().requires_grad_() for path, t in tree.parameters(params).items()}
    with torch.enable_grad():
        value, aux = loss(tree.replaced(params, held), batch)
    aux = tree.map(Tensor.detach, aux)
    if not value.requires_grad:
        return {path: torch.zeros_like(t) for path, t in held.items()}, aux
    grads = torch.autograd.grad(value, list(held.values()), allow_unused=True)
    both = zip(held.items(), grads, strict=True)
    return {path: torch.zeros_like(t) if g is None else g for (path, t), g in both}, aux


def _vectorised_gradient(
    loss: Callable[[Any, Batch], tuple[Tensor, A]], params: Any, batch: Batch
) -> tuple[Leaves, A]:
    """`gradient_and_aux` under vmap, which torch.autograd.grad does not support; BatchNorm ignores padding."""
    leaves = tree.leaves(params)
    held = tree.parameters(params)
    fixed = {path: t for path, t in leaves.items() if path not in held}

    def value(trained: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, A]:
        now = dict(zip((*held, *fixed), (*trained, *others), strict=True))
        with padding(batch.mask):
            return loss(tree.replaced(params, now), batch)

    grads, aux = torch.func.grad(value, has_aux=True)(tuple(held.values()), tuple(fixed.values()))
    return dict(zip(held, grads, strict=True)), tree.map(Tensor.detach, aux)
