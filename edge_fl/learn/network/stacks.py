"""Training of many clients' small networks as stacked matrix products, for the vectorised engine.

Under torch.func.vmap every operation of a step is dispatched twice, which takes longer than a small product itself. `fit` therefore leaves
vmap once, through the rule of an autograd.Function, and trains the stacks [K, ...] of all K clients by batched products.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from edge_fl.learn.network import chain, precision
from edge_fl.learn.network.chain import BoundLayer, Kind
from edge_fl.learn.optimiser import LeafPath, Leaves, Product, Sgd

Batch = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # x, y, mask and active of all clients
Batches = Callable[[Tensor, Tensor], Iterator[Batch]]  # (x [K, N, ...], y [K, N]) -> batches
Error = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (logits, labels, mask) -> d loss / d logits


def _linear(layer: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    y = torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
    return y, x


def _linear_backward(
    layer: nn.Linear, grad: Tensor, x: Tensor, wanted: bool, weight: Tensor, *bias: Tensor
) -> Any:
    return torch.bmm(grad, weight) if wanted else grad, (Product(grad, x), grad.sum(1))


KINDS: Mapping[Any, Kind] = {  # layers of stacks: x [K, B, ...], weights [K, O, I]
    nn.Linear: Kind(lambda layer: True, _linear, _linear_backward),
    nn.ReLU: chain.KINDS[nn.ReLU],
    nn.Flatten: Kind(
        lambda layer: True,
        lambda layer, x: (x.flatten(2), x.shape),
        lambda layer, grad, shape, wanted: (grad.reshape(shape), ()),
    ),
}


def supported(layers: Sequence[BoundLayer], optimiser: object, x: Tensor) -> bool:
    """Whether `fit` can train these layers on data x of the current vmap: fully connected ones, possibly behind functions of pixels, by SGD
    in float32.
    """
    first = next((place for place, bound in enumerate(layers) if bound.paths), None)
    if first is None or not is_functorch_wrapped_tensor(x) or precision.current() is not None:
        return False
    known = all(type(bound.layer) in KINDS for bound in layers[first:])
    frozen = all(type(bound.layer) in KINDS or not bound.tensors for bound in layers[:first])
    return known and frozen and type(optimiser) is Sgd and not optimiser.max_norm


def fit(
    layers: Sequence[BoundLayer], optimiser: Sgd, error: Error, x: Tensor, y: Tensor, batches: Batches
) -> Leaves:
    """Train the layers' tensors on all batches -> the new tensors by path; runs under vmap, as one call for all clients."""
    plan = _Plan(
        [(bound.layer, bound.paths, len(bound.tensors)) for bound in layers], optimiser, error, batches
    )
    tensors = [tensor for bound in layers for tensor in bound.tensors]
    return dict(zip(plan.paths, _Fit.apply(plan, x, y, *tensors), strict=True))


@dataclass(frozen=True)
class _Plan:
    """What `_Fit` needs besides tensors: each layer with the paths and the number of its tensors."""

    layers: Sequence[tuple[Any, tuple[LeafPath, ...], int]]
    optimiser: Sgd
    error: Error
    batches: Batches

    @property
    def paths(self) -> list[LeafPath]:
        return [path for _, paths, _ in self.layers for path in paths]

    def train(self, x: Tensor, y: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Train stacks [K, ...]; x [K, N, ...], y [K, N]."""
        bound, rest = [], list(tensors)
        for layer, paths, number in self.layers:
            held, rest = rest[:number], rest[number:]
            layer = layer if type(layer) in KINDS else _for_all_clients(layer)
            bound.append(BoundLayer(layer, tuple(t.clone() if paths else t for t in held), paths))
        params = {path: t for layer in bound for path, t in zip(layer.paths, layer.tensors, strict=False)}
        state = self.optimiser.init(params)
        remembers = bool(self.optimiser.momentum or self.optimiser.weight_decay)
        for x_now, y_now, mask, active in self.batches(x, y):
            found = chain.gradient(bound, x_now, lambda z: self.error(z, y_now, mask), kinds=KINDS)  # noqa: B023
            assert found is not None
            grads, _ = found
            changed = {**params, **{("state", *path): t for path, t in state.items()}}
            before = {p: t.clone() for p, t in changed.items()} if remembers and active is not None else {}
            self.optimiser.advance(params, grads, state)
            # A client without a batch keeps its values; without a state its gradient is 0.
            for path, old in before.items():
                assert active is not None
                mine = active.reshape(-1, *[1] * (old.dim() - 1))
                changed[path].copy_(torch.where(mine, changed[path], old))
        return tuple(params[path] for path in self.paths)


def _for_all_clients(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of samples [B, ...] as one of the samples of all clients [K, B, ...]."""
    return lambda x: layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class _Fit(torch.autograd.Function):
    """The bridge out of vmap: its rule gets the stacks of all clients."""

    @staticmethod
    def forward(plan: _Plan, x: Tensor, y: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        alone = plan.train(x.unsqueeze(0), y.unsqueeze(0), [t.unsqueeze(0) for t in tensors])
        return tuple(t.squeeze(0) for t in alone)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Nothing to save: training is not differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: _Plan, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """Tensors with a dimension of clients [K, ...], or without one if all clients have the same."""
        x, y, *rest = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[1:], strict=True)
        )
        trained = plan.train(x, y, rest)
        return trained, tuple(0 for _ in trained)
