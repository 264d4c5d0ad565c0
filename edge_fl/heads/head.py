"""The interface of personal heads: features to logits. A head is fitted on one client's samples and valid for one extractor.

A head is a small frozen value: prediction needs NumPy only, and it is saved as arrays and strings, without pickle. It never leaves the
client.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError, DataError, InputError
from edge_fl.heads.graph import Graph
from edge_fl.heads.plan import PLAIN, HeadPlan

Array = NDArray[Any]
Features = NDArray[np.float32]
Extras = Mapping[str, Mapping[str, Array]]
"""Shared parts that come with the extractor, by name: {"head": {"weight": ..., "bias": ...}}."""


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Training data of a head: features z float32 [n, d] (n >= 1) and class ids y int64 [n] below `classes`, in canonical order.

    `unit_norm`: every z has length 1. `balanced`: every class present has the same weight. `plan` and `extras` come with the release, for
    heads of its method.
    """

    z: Features
    y: NDArray[np.int64]
    classes: int
    extractor: str
    unit_norm: bool
    seed: int
    balanced: bool
    plan: HeadPlan = PLAIN
    extras: Extras = field(default_factory=dict)

    @property
    def present(self) -> NDArray[np.int64]:
        """The classes that occur, ascending [k]."""
        return np.unique(self.y)

    @property
    def weights(self) -> NDArray[np.float64]:
        """Sample weights [n] with mean 1: all 1, or n / (k * n_c) if balanced."""
        if not self.balanced:
            return np.ones(len(self.y))
        _, rows, counts = np.unique(self.y, return_inverse=True, return_counts=True)
        weights: NDArray[np.float64] = (len(self.y) / (len(counts) * counts))[rows]
        return weights


@dataclass(frozen=True, eq=False)
class Head(ABC):
    """A head for C = `classes` classes; `extractor` is the sha256 of the extractor that it was fitted for ("" for none)."""

    classes: int
    extractor: str

    kind: ClassVar[str]
    shapes: ClassVar[Mapping[str, tuple[str, ...]]]
    """Arrays by field name, each with a letter per dimension; equal letters are equal sizes, C is `classes`."""

    @classmethod
    @abstractmethod
    def fit(cls, data: TrainingSet) -> Self:
        """Fit the head to `data`, which has two or more classes except for the constant head."""

    @abstractmethod
    def logits(self, z: Features) -> Features:
        """Features z [n, d] -> logits float32 [n, C] over all classes; -inf for classes unknown to the head. Raises DataError."""

    def graph(self, graph: Graph, z: str) -> str:
        """Add the operations of `logits` on the value named `z`; return the name of their result. Raises InputError for a kind without."""
        raise InputError(
            f"a {self.kind} head cannot be exported: its class states no ONNX (Head.graph)",
            "nothing was written",
        )

    def predict(self, z: Features) -> NDArray[np.int64]:
        """Features z [n, d] -> class ids int64 [n]; the smallest of equals."""
        classes: NDArray[np.int64] = self.logits(z).argmax(axis=1).astype(np.int64)
        return classes

    def require(self, extractor: str) -> None:
        """Raise ArtefactError unless the head was fitted for the extractor with this sha256."""
        if self.extractor != extractor:
            raise ArtefactError(
                f"{self.kind} head: fitted on extractor {self.extractor[:8] or '(none)'}, used with {extractor[:8] or '(none)'}",
                consequence="a new head must be fitted",
            )

    def describe(self) -> dict[str, str]:
        """Metadata for the file of the head: {kind, extractor, classes}."""
        return {"kind": self.kind, "extractor": self.extractor, "classes": str(self.classes)}

    def to_arrays(self) -> dict[str, Array]:
        """Arrays by name; with `describe()` they define the head (`edge_fl.heads.from_arrays` is the inverse)."""
        return {name: getattr(self, name) for name in self.shapes}


def require_features(z: Array, dim: int, kind: str) -> None:
    """Raise DataError unless z is [n, dim]."""
    if z.ndim != 2 or z.shape[1] != dim:
        raise DataError(f"{kind} head: features of shape {list(z.shape)}, expected [n, {dim}]")


def standardisation(data: TrainingSet) -> tuple[Features, Features]:
    """Mean and std [d] of the features; std is 1 for a constant feature."""
    mean, std = data.z.mean(axis=0, dtype=np.float64), data.z.std(axis=0, dtype=np.float64)
    flat = std <= 1e-6 * np.maximum(np.abs(mean), 1e-6)
    return mean.astype(np.float32), np.where(flat, 1, std).astype(np.float32)


def identity_scaling(data: TrainingSet) -> tuple[Features, Features]:
    """Mean 0 and std 1 [d]: no standardisation."""
    dim = data.z.shape[1]
    return np.zeros(dim, np.float32), np.ones(dim, np.float32)
