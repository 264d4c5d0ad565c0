"""The ensemble head of DualFed: the mean of the probabilities of a personal MLP and the frozen global classifier (Eq. 5).

The MLP replaces projector and personal classifier, which a head-only device trains on features without the contrastive term.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, final

import numpy as np

from edge_fl.heads.descent import probabilities, received
from edge_fl.heads.graph import Graph
from edge_fl.heads.head import Features, Head, TrainingSet
from edge_fl.heads.mlp import Mlp

TINY = np.float32(1e-30)
"""Keeps the logarithm of a zero probability finite."""


@final
@dataclass(frozen=True, eq=False)
class Ensemble(Head):
    """The arrays of an MLP head, and theirs [C, d], theirs_bias [C] of the global classifier."""

    hidden_weights: Features
    hidden_bias: Features
    weights: Features
    bias: Features
    mean: Features
    std: Features
    theirs: Features
    theirs_bias: Features

    kind: ClassVar[str] = "ensemble"
    shapes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Mlp.shapes,
        "theirs": ("C", "d"),
        "theirs_bias": ("C",),
    }

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        theirs = received(data, data.plan.start)
        bias = np.zeros(data.classes, np.float32) if theirs.bias is None else theirs.bias
        return cls(
            data.classes,
            data.extractor,
            **Mlp.fit(data).to_arrays(),
            theirs=theirs.weight,
            theirs_bias=bias,
        )

    @property
    def mlp(self) -> Mlp:
        """The personal part."""
        return Mlp(self.classes, self.extractor, **{name: getattr(self, name) for name in Mlp.shapes})

    def logits(self, z: Features) -> Features:
        """Logarithm of the mean of both probabilities."""
        ours, theirs = probabilities(self.mlp.logits(z)), probabilities(z @ self.theirs.T + self.theirs_bias)
        logits: Features = np.log((ours + theirs) / 2 + TINY)
        return logits

    def graph(self, graph: Graph, z: str) -> str:
        votes = (self.mlp.graph(graph, z), graph.affine(z, self.theirs, self.theirs_bias))
        both = graph.node("Add", *(graph.node("Softmax", vote, axis=1) for vote in votes))
        mean = graph.node("Mul", both, graph.constant(0.5))
        return graph.node("Log", graph.node("Add", mean, graph.constant(TINY)))
