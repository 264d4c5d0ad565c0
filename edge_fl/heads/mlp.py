"""The MLP head: d -> 256 -> C with ReLU, max(10 epochs, 300 steps) of SGD in NumPy (docs/methods-on-devices.md, "Heads").

The minimum of 300 steps is for clients with a few dozen samples. The step size suits features of length 1; others are standardised and
divided by sqrt(d), to about that length (unscaled features of 512 dimensions do not converge).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray

from edge_fl.heads.descent import probabilities
from edge_fl.heads.head import (
    Array,
    Features,
    FittableHead,
    Graph,
    Head,
    TrainingSet,
    identity_scaling,
    require_features,
    standardisation,
)
from edge_fl.seeds import generator

HIDDEN = 256
EPOCHS, STEPS = 10, 300
BATCH, RATE, MOMENTUM = 32, np.float32(0.1), np.float32(0.9)
Weights = list[Features]


@final
@dataclass(frozen=True, eq=False)
class Mlp(FittableHead):
    """A hidden layer of 256 units with ReLU, trained by SGD.

    hidden_weights [h, d], hidden_bias [h], weights [C, h], bias [C]; mean and std [d]. Covers all C classes.
    """

    hidden_weights: Features
    hidden_bias: Features
    weights: Features
    bias: Features
    mean: Features
    std: Features

    kind: ClassVar[str] = "mlp"
    shapes: ClassVar[Mapping[str, str]] = {
        "hidden_weights": "hd",
        "hidden_bias": "h",
        "weights": "Ch",
        "bias": "C",
        "mean": "d",
        "std": "d",
    }

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        return cls.trained(data)

    @classmethod
    def trained(cls, data: TrainingSet, given: Features | None = None) -> Self:
        """Trained from random weights; as a residual on the logits `given` [n, C] with a last layer that starts at zero."""
        mean, std = identity_scaling(data) if data.unit_norm else standardisation(data)
        if not data.unit_norm:
            std = std * np.float32(np.sqrt(len(std)))
        u, cost = (data.z - mean) / std, data.weights.astype(np.float32)
        rng = generator(data.seed, "head")
        layers = [*_layer(u.shape[1], HIDDEN, rng), *_layer(HIDDEN, data.classes, rng)]
        if given is None:
            given = np.zeros((len(u), data.classes), np.float32)
        else:
            layers[2][:] = 0
        velocity = [np.zeros_like(layer) for layer in layers]
        for rows in _batches(len(u), rng):
            for layer, speed, grad in zip(
                layers,
                velocity,
                _gradient(layers, u[rows], data.y[rows], cost[rows], given[rows]),
                strict=True,
            ):
                speed *= MOMENTUM
                speed += grad
                layer -= RATE * speed
        hidden_weights, hidden_bias, weights, bias = layers
        return cls(data.classes, data.extractor, hidden_weights, hidden_bias, weights, bias, mean, std)

    def times(self, factor: float) -> Mlp:
        """The head with its logits multiplied by `factor`."""
        return replace(self, weights=self.weights * np.float32(factor), bias=self.bias * np.float32(factor))

    def logits(self, z: Features) -> Features:
        require_features(z, len(self.mean), self.kind)
        u = (z - self.mean) / self.std
        logits: Features = (
            np.maximum(u @ self.hidden_weights.T + self.hidden_bias, 0) @ self.weights.T + self.bias
        )
        return logits

    def graph(self, graph: Graph, z: str) -> str:
        u = graph.standardised(z, self.mean, self.std)
        hidden = graph.node("Relu", graph.affine(u, self.hidden_weights, self.hidden_bias))
        return graph.affine(hidden, self.weights, self.bias)


@dataclass(frozen=True, eq=False)
class WithMlp(Head, ABC):
    """A head of which `mlp` is a part; the arrays of both are stored side by side: `shapes` contains those of an MLP."""

    mlp: Mlp

    @classmethod
    def of_arrays(cls, classes: int, extractor: str, arrays: Mapping[str, Array]) -> Self:
        mlp = Mlp.of_arrays(classes, extractor, {name: arrays[name] for name in Mlp.shapes})
        others = {name: array for name, array in arrays.items() if name not in Mlp.shapes}
        return cls(classes, extractor, mlp=mlp, **others)

    def to_arrays(self) -> dict[str, Array]:
        others = {name: getattr(self, name) for name in self.shapes if name not in Mlp.shapes}
        return {**self.mlp.to_arrays(), **others}


def _layer(inputs: int, outputs: int, rng: np.random.Generator) -> tuple[Features, Features]:
    bound = np.sqrt(6 / inputs)  # Kaiming, uniform
    return rng.uniform(-bound, bound, (outputs, inputs)).astype(np.float32), np.zeros(outputs, np.float32)


def _batches(samples: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of every step, max(10 epochs, 300 steps) in total; every epoch is shuffled anew and ends with its short batch."""
    size = min(BATCH, samples)
    left = max(EPOCHS * -(-samples // size), STEPS)
    while left > 0:
        order = rng.permutation(samples)
        for start in range(0, samples, size)[:left]:
            yield order[start : start + size]
            left -= 1


def _gradient(layers: Weights, u: Features, y: NDArray[np.int64], cost: Features, given: Features) -> Weights:
    """Gradient of the weighted mean cross-entropy over the batch, in the order of `layers`."""
    hidden_weights, hidden_bias, weights, bias = layers
    hidden = np.maximum(u @ hidden_weights.T + hidden_bias, 0)
    logits = given + hidden @ weights.T + bias
    error = probabilities(logits)
    error[np.arange(len(y)), y] -= 1
    error *= (cost / len(y))[:, None]
    below = (error @ weights) * (hidden > 0)
    return [below.T @ u, below.sum(axis=0), error.T @ hidden, error.sum(axis=0)]
