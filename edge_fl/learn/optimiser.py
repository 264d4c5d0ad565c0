"""Optimisers as frozen values: `init` returns the state, `step` is pure, `advance` works in place, `at(round)` applies the schedule."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from edge_fl.config import OptimiserConfig
from edge_fl.learn import tree

LeafPath = tuple[str, ...]
Leaves = dict[LeafPath, Tensor]  # trainable tensors by path


@dataclass(frozen=True, slots=True)
class Product:
    """The gradient of a linear layer's weight as its factors: left [B, O] and right [B, I] stand for left.T @ right [O, I].

    With a leading dimension of clients in all three, one product per client.
    """

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """The gradient itself."""
        return self.left.mT @ self.right

    def add_to(self, weight: Tensor, share: float) -> None:
        """weight += share * gradient, in one pass over the weight."""
        if is_functorch_wrapped_tensor(weight):  # vmap has no rule for addmm_
            weight.add_(self.dense(), alpha=share)
        elif weight.dim() == 3:
            weight.baddbmm_(self.left.mT, self.right, alpha=share)
        else:
            weight.addmm_(self.left.mT, self.right, alpha=share)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The gradient of a loss with a proximal term: gradient + strength * (weight - reference)."""

    gradient: Tensor | Product
    weight: Tensor
    reference: Tensor
    strength: float

    def dense(self) -> Tensor:
        """The gradient itself."""
        return torch.add(_dense(self.gradient), self.weight - self.reference, alpha=self.strength)

    def add_to(self, weight: Tensor, share: float) -> None:
        """weight += share * gradient, if it still has the value for which the gradient was computed."""
        if is_functorch_wrapped_tensor(weight):  # vmap has no rule for lerp_
            weight.add_(weight - self.reference, alpha=share * self.strength)
        else:
            weight.lerp_(self.reference, -share * self.strength)
        _add(weight, self.gradient, share)


Gradient = Tensor | Product | Pulled
Gradients = Mapping[LeafPath, Gradient]


def dense(grads: Gradients) -> Leaves:
    """The gradients as tensors, factors multiplied."""
    return {path: _dense(gradient) for path, gradient in grads.items()}


def _dense(gradient: Gradient) -> Tensor:
    return gradient if isinstance(gradient, Tensor) else gradient.dense()


def _add(weight: Tensor, gradient: Gradient, share: float) -> None:
    """weight += share * gradient, in place."""
    if isinstance(gradient, Tensor):
        weight.add_(gradient, alpha=share)
    else:
        gradient.add_to(weight, share)


@dataclass(frozen=True)
class Optimiser(ABC):
    """`lr_steps` lists (round, factor), rounds from 1: from that round on the learning rate is lr * factor.

    `max_norm` is the largest joint L2 norm of the gradients; larger ones are scaled down. 0: no limit.
    """

    lr: float
    weight_decay: float = 0.0
    lr_steps: tuple[tuple[int, float], ...] = ()
    max_norm: float = field(default=0.0, kw_only=True)

    def at(self, round: int) -> Self:
        """The optimiser with the learning rate of a round (1-based)."""
        factor = next((factor for start, factor in reversed(self.lr_steps) if round >= start), 1.0)
        return replace(self, lr=self.lr * factor, lr_steps=())

    @abstractmethod
    def init(self, params: Leaves) -> Any:
        """The state before the first step."""

    def step(self, params: Leaves, grads: Gradients, state: Any) -> tuple[Leaves, Any]:
        """One step -> (params, state), without changes in place."""
        params, state = tree.clone(params), tree.clone(state)
        self.advance(params, grads, state)
        return params, state

    @abstractmethod
    def advance(self, params: Leaves, grads: Gradients, state: Any) -> None:
        """One step that changes `params` and `state` in place."""

    def _prepared(self, params: Leaves, factored: Gradients) -> Leaves:
        """Gradients after clipping and weight decay, in torch's order."""
        grads = dense(factored)
        if self.max_norm and grads:
            norm = torch.sqrt(torch.stack([(g**2).sum() for g in grads.values()]).sum())
            scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
            grads = {p: g * scale for p, g in grads.items()}
        if self.weight_decay == 0.0:
            return grads
        return {p: g.add(params[p], alpha=self.weight_decay) for p, g in grads.items()}


@dataclass(frozen=True)
class Sgd(Optimiser):
    """Stochastic gradient descent as torch.optim.SGD computes it: velocity = momentum * velocity + grad."""

    momentum: float = 0.0

    def init(self, params: Leaves) -> Leaves:
        return {p: torch.zeros_like(t) for p, t in params.items()} if self.momentum else {}

    def advance(self, params: Leaves, grads: Gradients, state: Leaves) -> None:
        if self.momentum:
            prepared = self._prepared(params, grads)
            grads = {p: state[p].mul_(self.momentum).add_(g) for p, g in prepared.items()}
        elif self.weight_decay or self.max_norm:
            grads = self._prepared(params, grads)
        for p, g in grads.items():
            _add(params[p], g, -self.lr)


@dataclass(frozen=True)
class Adam(Optimiser):
    """Adam as torch.optim.Adam computes it (weight decay is added to the gradient)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, params: Leaves) -> tuple[Leaves, Leaves, Tensor]:
        first = {p: torch.zeros_like(t) for p, t in params.items()}
        device = next(iter(params.values())).device if params else None
        return first, tree.clone(first), torch.zeros((), device=device)

    def advance(self, params: Leaves, grads: Gradients, state: Any) -> None:
        first, second, count = state
        count.add_(1)
        rate, root = self.lr / (1 - self.beta1**count), torch.sqrt(1 - self.beta2**count)
        for p, g in self._prepared(params, grads).items():
            first[p].mul_(self.beta1).add_(g, alpha=1 - self.beta1)
            second[p].mul_(self.beta2).add_(g * g, alpha=1 - self.beta2)
            params[p].sub_(first[p] / second[p].sqrt().div_(root).add_(self.eps) * rate)


def optimiser(config: OptimiserConfig) -> Optimiser:
    """The optimiser that a recipe names."""
    steps = tuple((round, factor) for round, factor in config.lr_steps)
    if config.name == "adam":
        return Adam(config.lr, config.weight_decay, steps)
    return Sgd(config.lr, config.weight_decay, steps, config.momentum)
