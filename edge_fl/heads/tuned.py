"""The tuned head: linear on raw features, fitted from the release's head as the method's own stage does.

`tune` runs SGD from the received head (fine-tuning; Ditto and pFedMe with a pull towards it; Fed-RoD, whose personal head plus the frozen
generic one is one linear head; FedETF's copy of the frame). `mix` first learns how much of the received head to use (FedALA); `ridge` is
SphereFed's closed form on this device's samples.
"""

from __future__ import annotations

from typing import ClassVar, Self, final

import numpy as np
from msgspec.structs import replace

from edge_fl.heads.descent import Weights, batches, descend, one_hot, probabilities, received
from edge_fl.heads.head import Features, TrainingSet, identity_scaling
from edge_fl.heads.linear import Linear

# names of extras: this device's previous head, and a factor on logits
OWN, SCALE = "own", "scale"


@final
class Tuned(Linear):
    """A linear head over all classes, without standardisation."""

    kind: ClassVar[str] = "tuned"

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        return cls.of(data, tune(data))

    @classmethod
    def of(cls, data: TrainingSet, weights: Weights) -> Self:
        """The head with these weights."""
        bias = np.zeros(data.classes, np.float32) if weights.bias is None else weights.bias
        everyone = np.arange(data.classes, dtype=np.int64)
        return cls(data.classes, data.extractor, weights.weight, bias, *identity_scaling(data), everyone)

    def raw(self) -> Weights:
        """The weights in the form that is sent."""
        return Weights(self.weights, self.bias)


def tune(data: TrainingSet) -> Weights:
    """SGD from the received head; with a scale s the head is s times the trained weights (FedETF, Eq. 5)."""
    scale = float(data.extras[SCALE]["s"]) if SCALE in data.extras else 1.0
    start = received(data, data.plan.start).times(data.plan.times * scale)
    return descend(start, data, lr=data.plan.lr * scale**2)


def mix(data: TrainingSet) -> Weights:
    """Train the weights W in [0, 1] of theirs over ours for one epoch, from 1 (FedALA, Eq. 5), then SGD; without ours only SGD."""
    theirs = received(data, data.plan.start)
    start = theirs if OWN not in data.extras else _mixed(data, theirs, received(data, OWN))
    return descend(start, data)


def _mixed(data: TrainingSet, theirs: Weights, ours: Weights) -> Weights:
    mine, target = _layers(ours), one_hot(data)
    gaps = [a - b for a, b in zip(_layers(theirs), mine, strict=True)]
    shares = [np.ones_like(gap) for gap in gaps]
    head = theirs
    for rows in batches(len(data.z), replace(data.plan, epochs=1, min_steps=0), data.seed):
        z = data.z[rows]
        error = (probabilities(head.logits(z)) - target[rows]) / np.float32(len(rows))
        grads = (error.T @ z, error.sum(axis=0))
        for share, gap, grad in zip(shares, gaps, grads, strict=True):
            np.clip(share - np.float32(data.plan.mixing) * grad * gap, 0, 1, out=share)
        head = Weights(*(own + share * gap for own, share, gap in zip(mine, shares, gaps, strict=True)))
    return head


def ridge(data: TrainingSet) -> Weights:
    """(A + λI)^-1 B of this device's own sums (SphereFed, FFC); no bias."""
    a, b = ridge_sums(data)
    solved = np.linalg.solve(a.astype(np.float64) + data.plan.ridge * np.eye(len(a)), b.astype(np.float64))
    return Weights(np.ascontiguousarray(solved.T, np.float32), None)


def ridge_sums(data: TrainingSet) -> tuple[Features, Features]:
    """A = Σ z zᵀ [d, d] and B = Σ z onehotᵀ [d, C]."""
    z = data.z.astype(np.float64)
    return (z.T @ z).astype(np.float32), (z.T @ one_hot(data)).astype(np.float32)


def _layers(head: Weights) -> list[Features]:
    bias = np.zeros(len(head.weight), np.float32) if head.bias is None else head.bias
    return [head.weight, bias]
