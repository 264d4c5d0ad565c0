"""SGD on a linear head in NumPy, shared by the head stages of the methods (docs/methods-on-devices.md, "Heads").

The loss is cross-entropy with soft targets t whose rows need not sum to 1; its gradient in the logits is p * sum(t) - t. This covers labels
(t one-hot) and labels plus a teacher (t = one-hot + teacher's probabilities: cross-entropy and KL, F4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError, RunError
from edge_fl.failures import Failure
from edge_fl.heads.head import Array, Features, TrainingSet
from edge_fl.heads.plan import HeadPlan
from edge_fl.seeds import generator


@dataclass(frozen=True, eq=False)
class Weights:
    """A linear head: weight [C, d] and bias [C] or None. `arrays` has torch's names."""

    weight: Features
    bias: Features | None

    def logits(self, z: Features) -> Features:
        logits = z @ self.weight.T
        return logits if self.bias is None else logits + self.bias

    def arrays(self) -> dict[str, Array]:
        """The head as a shared part."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def times(self, factor: float) -> Weights:
        return Weights(
            self.weight * np.float32(factor), None if self.bias is None else self.bias * np.float32(factor)
        )


def received(data: TrainingSet, name: str) -> Weights:
    """The linear head in the extra `name`; prototypes become the nearest-prototype head. Raises ArtefactError for anything else."""
    arrays: Mapping[str, Array] = data.extras.get(name, {})
    if arrays.keys() == {"mean", "count"}:
        arrays = {"weight": arrays["mean"], "bias": -0.5 * np.square(arrays["mean"]).sum(axis=1)}
    expected = {"weight": (data.classes, data.z.shape[1]), "bias": (data.classes,)}
    wrong = {key: list(array.shape) for key, array in arrays.items() if array.shape != expected.get(key)}
    if "weight" not in arrays or wrong:
        raise ArtefactError(
            f"extra {name!r}: {wrong or 'no weight'}, expected a head {expected}",
            Failure.MANIFEST,
            consequence="no head was fitted",
        )
    bias = arrays.get("bias")
    return Weights(arrays["weight"].astype(np.float32), None if bias is None else bias.astype(np.float32))


def probabilities(logits: Features) -> Features:
    """Softmax over the last axis; a logit of -inf has probability 0."""
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Features = exponents / exponents.sum(axis=-1, keepdims=True)
    return shares


def one_hot(data: TrainingSet) -> Features:
    """One-hot targets [n, C]."""
    return np.eye(data.classes, dtype=np.float32)[data.y]


def batches(samples: int, plan: HeadPlan, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of every step."""
    rng, size = generator(seed, "head"), min(plan.batch_size, samples)
    per_epoch = -(-samples // size)
    epochs = plan.epochs if plan.batches else max(plan.epochs, -(-plan.min_steps // per_epoch))
    order = rng.permutation(samples)
    for _ in range(epochs):
        order = order if plan.batches else rng.permutation(samples)
        for start in range(0, samples, size)[: plan.batches or None]:
            yield order[start : start + size]


def descend(
    start: Weights,
    data: TrainingSet,
    targets: Features | None = None,
    given: Features | None = None,
    **changes: float,
) -> Weights:
    """Train `start` by SGD on features z towards `targets` [n, C] (default: the labels), with the settings of `data.plan` and `changes`.

    `given` [n, C] are added logits that are not trained. The pull is an implicit step, stable for any weight. Raises RunError.
    """
    plan = replace(data.plan, **changes)
    targets = one_hot(data) if targets is None else targets
    given = np.zeros_like(targets) if given is None else given
    held = [start.weight.copy(), *([] if start.bias is None else [start.bias.copy()])]
    anchor, speed = [layer.copy() for layer in held], [np.zeros_like(layer) for layer in held]
    lr, shrink = np.float32(plan.lr), np.float32(1 / (1 + plan.lr * plan.pull))
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in batches(len(data.z), plan, data.seed):
            z, target = data.z[rows], targets[rows]
            p = probabilities(z @ held[0].T + sum(held[1:], given[rows]))
            error = (p * target.sum(axis=1, keepdims=True) - target) / np.float32(len(rows))
            for layer, velocity, origin, grad in zip(
                held, speed, anchor, (error.T @ z, error.sum(axis=0)), strict=False
            ):
                velocity *= np.float32(plan.momentum)
                velocity += grad + np.float32(plan.weight_decay) * layer
                layer -= lr * velocity
                if plan.pull:
                    layer += (1 - shrink) * (origin - layer)
    if not all(np.isfinite(layer).all() for layer in held):
        raise RunError("head: SGD diverged to NaN or Infinity; try a lower learning rate", "head not used")
    return Weights(held[0], held[1] if len(held) > 1 else None)
