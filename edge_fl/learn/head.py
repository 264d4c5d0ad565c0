"""The loss that heads are trained with, and its gradient in closed form: a linear head needs no autograd.

Heads take many small steps on cached features, where building and walking a graph costs more than the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_fl.learn.batches import Batch
from edge_fl.learn.losses import cross_entropy, one_hot
from edge_fl.learn.optimiser import Leaves
from edge_fl.learn.part import Part
from edge_fl.learn.tree import Params


@dataclass(frozen=True)
class HeadLoss:
    """Cross-entropy of a head on features: (params of the head, batch of features) -> scalar."""

    head: Part

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        return cross_entropy(self.head(params, batch.x), batch.y, batch.mask)

    def gradient(self, params: Params, batch: Batch) -> Leaves | None:
        """(softmax - one-hot) / B times the features, for a linear head; None for any other."""
        if not self.head.linear:
            return None
        weight, bias = params["weight"], params["bias"]
        share = (
            1.0 / len(batch.y)
            if batch.mask is None
            else (batch.mask / batch.mask.sum().clamp(min=1))[:, None]
        )
        wrong = torch.softmax(torch.addmm(bias, batch.x, weight.T), dim=-1) - one_hot(batch.y, len(bias))
        wrong = wrong * share
        return {("weight",): wrong.T @ batch.x, ("bias",): wrong.sum(0)}
