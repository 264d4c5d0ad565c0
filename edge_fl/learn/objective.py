"""Cross-entropy of parts in sequence with further terms, the loss of most stages; in closed form where the parts are chains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch
from edge_fl.learn.losses import cross_entropy, one_hot, proximal
from edge_fl.learn.network import chain
from edge_fl.learn.network.chain import BoundLayer
from edge_fl.learn.network.part import Part
from edge_fl.learn.optimiser import Gradients, Pulled
from edge_fl.learn.tree import Params, Parts


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of parts applied in sequence: (params, batch) -> scalar.

    `frozen` holds the params of frozen parts. `params` are Params if a single part is trained, else Parts.
    on_features: a further term, (input z [B, d] of the last part, batch) -> scalar.
    reference, pull: a further proximal term, pull/2 * squared distance of the params to the reference.
    """

    parts: Mapping[str, Part]
    frozen: Parts = field(default_factory=dict)
    on_features: Callable[[Tensor, Batch], Tensor] | None = None
    reference: Any = None  # Params or Parts, like `params`
    pull: float = 0.0

    def __call__(self, params: Params | Parts, batch: Batch) -> Tensor:
        return self.with_features(params, batch)[0]

    def with_features(self, params: Params | Parts, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss, input z [B, d] of the last part)."""
        x = z = batch.x
        held = self._held(params)
        for name, part in self.parts.items():
            z = x
            x = part.frozen(held[name], x) if name in self.frozen else part(held[name], x)
        loss = cross_entropy(x, batch.y, batch.mask)
        if self.on_features is not None:
            loss = loss + self.on_features(z, batch)
        return loss + proximal(params, self.reference, self.pull), z

    def gradient(
        self, params: Params | Parts, batch: Batch, bound: Sequence[BoundLayer] | None = None
    ) -> tuple[Gradients, Tensor] | None:
        """(d loss / d params, z) in closed form; None if a part is not a chain, `params` has other trained leaves, or a term
        on z has no layer behind it.

        bound: the layers of these params, from `bind`, which need not be looked up for every batch.
        """
        bound = self.bind(params) if bound is None else bound
        if bound is None:
            return None
        last = list(self.parts.values())[-1].chain or ()
        if self.on_features is not None and not last:  # no layer whose input is z
            return None
        more = None if self.on_features is None else lambda z: self._on_features_gradient(z, batch)
        with torch.no_grad():
            found = chain.gradient(
                bound,
                batch.x,
                lambda logits: error(logits, batch.y, batch.mask),
                more,
                len(bound) - len(last),
            )
            if found is None or not self.pull:
                return found
            grads, z = found
            trained, towards = tree.parameters(params), tree.parameters(self.reference)
            return {path: Pulled(g, trained[path], towards[path], self.pull) for path, g in grads.items()}, z  # type: ignore[arg-type]

    def layers(self, params: Params | Parts) -> list[BoundLayer] | None:
        """The layers with their tensors, if the loss is the plain cross-entropy of a chain with these trained leaves; else None."""
        return None if self.on_features is not None or self.pull else self.bind(params)

    def bind(self, params: Params | Parts) -> list[BoundLayer] | None:
        """The layers of all parts with their tensors; None if a part is not a chain or `params` has other trained leaves."""
        if any(part.chain is None for part in self.parts.values()):
            return None
        held, alone = self._held(params), len(self.parts) == len(self.frozen) + 1
        bound = []
        for name, part in self.parts.items():
            prefix = () if alone else (name,)
            for layer, names in part.chain or ():
                paths = () if name in self.frozen else tuple((*prefix, tensor) for tensor in names)
                bound.append(BoundLayer(layer, tuple(held[name][tensor] for tensor in names), paths))
        return bound if sum(len(layer.paths) for layer in bound) == len(tree.parameters(params)) else None

    def _held(self, params: Params | Parts) -> Mapping[str, Params]:
        trained = [name for name in self.parts if name not in self.frozen]
        return {**self.frozen, **(params if len(trained) > 1 else {trained[0]: params})}  # type: ignore[dict-item]

    def _on_features_gradient(self, z: Tensor, batch: Batch) -> Tensor:
        """d on_features / dz by autograd, which is quick for a term on a batch of features."""
        assert self.on_features is not None
        if is_functorch_wrapped_tensor(z):
            return torch.func.grad(self.on_features)(z, batch)  # type: ignore[no-any-return]
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            return torch.autograd.grad(self.on_features(z, batch), z)[0]


def pulled(
    loss: Callable[[Any, Batch], Tensor], reference: Any, strength: float
) -> Callable[[Any, Batch], Tensor]:
    """The loss, which may be any function, plus strength/2 * squared distance of the params to the reference."""
    if isinstance(loss, CrossEntropy) and not loss.pull:
        return replace(loss, reference=reference, pull=strength)
    return lambda params, batch: loss(params, batch) + proximal(params, reference, strength)


def error(logits: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """d cross-entropy / d logits: (softmax - one-hot) / B of logits [..., B, C], labels and mask [..., B]."""
    likely = torch.softmax(logits, dim=-1)
    if mask is None and not is_functorch_wrapped_tensor(likely):
        return likely.scatter_(-1, y.unsqueeze(-1), -1.0, reduce="add").mul_(1.0 / y.shape[-1])
    wrong = likely - one_hot(y, logits.shape[-1])
    if mask is None:
        return wrong.mul_(1.0 / y.shape[-1])
    return wrong * (mask / mask.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
