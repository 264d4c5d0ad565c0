"""Cross-entropy of parts in sequence: the loss of most stages, with a closed-form gradient where the parts are chains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch
from edge_fl.learn.losses import cross_entropy, one_hot
from edge_fl.learn.network import chain
from edge_fl.learn.network.chain import BoundLayer
from edge_fl.learn.network.part import Part
from edge_fl.learn.optimiser import Gradients
from edge_fl.learn.tree import Params, Parts


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of parts applied in sequence: (params, batch) -> scalar.

    `frozen` holds the params of frozen parts. `params` are Params if a single part is trained, else Parts.
    """

    parts: Mapping[str, Part]
    frozen: Parts = field(default_factory=dict)

    def __call__(self, params: Params | Parts, batch: Batch) -> Tensor:
        x, held = batch.x, self._held(params)
        for name, part in self.parts.items():
            x = part.frozen(held[name], x) if name in self.frozen else part(held[name], x)
        return cross_entropy(x, batch.y, batch.mask)

    def gradient(self, params: Params | Parts, batch: Batch) -> Gradients | None:
        """d loss / d params in closed form; None if a part is not a chain or `params` has other trained leaves."""
        if any(part.chain is None for part in self.parts.values()):
            return None
        bound = self._bound(params)
        if sum(len(layer.paths) for layer in bound) != len(tree.parameters(params)):
            return None

        def error(logits: Tensor) -> Tensor:
            """(softmax - one-hot) / B."""
            mask = batch.mask
            share = 1.0 / len(batch.y) if mask is None else (mask / mask.sum().clamp(min=1))[:, None]
            return (torch.softmax(logits, dim=-1) - one_hot(batch.y, logits.shape[-1])) * share

        with torch.no_grad():
            return chain.gradient(bound, batch.x, error)

    def _held(self, params: Params | Parts) -> Mapping[str, Params]:
        trained = [name for name in self.parts if name not in self.frozen]
        return {**self.frozen, **(params if len(trained) > 1 else {trained[0]: params})}  # type: ignore[dict-item]

    def _bound(self, params: Params | Parts) -> list[BoundLayer]:
        held, alone = self._held(params), len(self.parts) == len(self.frozen) + 1
        bound = []
        for name, part in self.parts.items():
            prefix = () if alone else (name,)
            for layer, names in part.chain or ():
                paths = () if name in self.frozen else tuple((*prefix, tensor) for tensor in names)
                bound.append(BoundLayer(layer, tuple(held[name][tensor] for tensor in names), paths))
        return bound
