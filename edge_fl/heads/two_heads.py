"""Heads that combine a personal head with the frozen global one of the release: the gated head of FedCP, the ensemble of DualFed.

FedCP: a frozen policy weights every feature between both heads. Only the personal head is trained here, by SGD from the global one; policy
and global head are extras of the release. DualFed: the mean of the probabilities of a personal MLP and the global classifier (Eq. 5). The
MLP replaces projector and personal classifier, which a head-only device trains on features without the contrastive term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import numpy as np

from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.heads.descent import Weights, descend, probabilities, received
from edge_fl.heads.head import Array, Features, FittableHead, Graph, TrainingSet, require_features
from edge_fl.heads.mlp import Mlp, WithMlp

POLICY = "policy"
EPSILON = 1e-5  # as in torch's LayerNorm
NAMES = {"0.weight": "inner", "0.bias": "inner_bias", "1.weight": "gain", "1.bias": "shift"}
TINY = np.float32(1e-30)
"""Keeps the logarithm of a zero probability finite."""


@final
@dataclass(frozen=True, eq=False)
class Gated(FittableHead):
    """weights, bias of the personal head; theirs, theirs_bias of the global one; context v [d]; the policy d -> 2d -> (2, d)."""

    weights: Features
    bias: Features
    theirs: Features
    theirs_bias: Features
    context: Features
    inner: Features
    inner_bias: Features
    gain: Features
    shift: Features

    kind: ClassVar[str] = "gated"
    shapes: ClassVar[Mapping[str, str]] = {
        "weights": "Cd",
        "bias": "C",
        "theirs": "Cd",
        "theirs_bias": "C",
        "context": "d",
        "inner": "ed",
        "inner_bias": "e",
        "gain": "e",
        "shift": "e",
    }

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        """Train the personal head on ours * z; the global head's logits on the rest are added to the prediction and the loss."""
        theirs, policy = received(data, data.plan.start), _policy(data)
        bias = np.zeros(data.classes, np.float32) if theirs.bias is None else theirs.bias
        context = theirs.weight.sum(axis=0)
        start = cls(data.classes, data.extractor, theirs.weight, bias, theirs.weight, bias, context, **policy)
        ours, rest = start.gates(data.z)
        given = ((rest * data.z) @ theirs.weight.T + bias).astype(np.float32)
        trained = descend(Weights(theirs.weight, bias), replace(data, z=ours * data.z), given=given)
        assert trained.bias is not None
        return cls(
            data.classes, data.extractor, trained.weight, trained.bias, theirs.weight, bias, context, **policy
        )

    def gates(self, z: Features) -> tuple[Features, Features]:
        """Weights of each feature for the personal and the global head; they sum to 1 (Eqs. 4 to 6)."""
        x = (
            z * self.context / max(float(np.linalg.norm(self.context)), 1e-12)
        ) @ self.inner.T + self.inner_bias
        mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
        x = np.maximum((x - mean) / np.sqrt(variance + EPSILON) * self.gain + self.shift, 0)
        shares = probabilities(x.reshape(len(z), 2, -1).transpose(0, 2, 1).astype(np.float32))
        return shares[..., 0], shares[..., 1]

    def logits(self, z: Features) -> Features:
        require_features(z, len(self.context), self.kind)
        ours, rest = self.gates(z)
        personal = (ours * z) @ self.weights.T + self.bias
        logits: Features = (personal + (rest * z) @ self.theirs.T + self.theirs_bias).astype(np.float32)
        return logits

    def graph(self, graph: Graph, z: str) -> str:
        dim = graph.dim
        context = self.context / max(float(np.linalg.norm(self.context)), 1e-12)
        scaled = graph.node("Mul", z, graph.constant(context))
        x = graph.normalised(graph.affine(scaled, self.inner, self.inner_bias), 2 * dim, EPSILON)
        x = graph.node("Add", graph.node("Mul", x, graph.constant(self.gain)), graph.constant(self.shift))
        x = graph.node("Relu", x)
        ours, rest = graph.columns(x, 0, dim), graph.columns(x, dim, 2 * dim)

        def branch(own: str, other: str, weights: Array, bias: Array) -> str:
            gate = graph.node("Sigmoid", graph.node("Sub", own, other))  # softmax over the two
            return graph.affine(graph.node("Mul", gate, z), weights, bias)

        personal = branch(ours, rest, self.weights, self.bias)
        return graph.node("Add", personal, branch(rest, ours, self.theirs, self.theirs_bias))


def _policy(data: TrainingSet) -> dict[str, Array]:
    arrays, d = data.extras.get(POLICY, {}), data.z.shape[1]
    expected = {"0.weight": (2 * d, d), "0.bias": (2 * d,), "1.weight": (2 * d,), "1.bias": (2 * d,)}
    if {name: array.shape for name, array in arrays.items()} != expected:
        raise ArtefactError(
            f"extra {POLICY!r}: holds {', '.join(arrays)}, expected {expected}",
            Failure.MANIFEST,
            consequence="no head was fitted",
        )
    return {NAMES[name]: array.astype(np.float32) for name, array in arrays.items()}


@final
@dataclass(frozen=True, eq=False)
class Ensemble(WithMlp, FittableHead):
    """The personal `mlp`, and theirs [C, d], theirs_bias [C] of the global classifier."""

    theirs: Features
    theirs_bias: Features

    kind: ClassVar[str] = "ensemble"
    shapes: ClassVar[Mapping[str, str]] = {**Mlp.shapes, "theirs": "Cd", "theirs_bias": "C"}

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        theirs = received(data, data.plan.start)
        bias = np.zeros(data.classes, np.float32) if theirs.bias is None else theirs.bias
        return cls(data.classes, data.extractor, mlp=Mlp.fit(data), theirs=theirs.weight, theirs_bias=bias)

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
