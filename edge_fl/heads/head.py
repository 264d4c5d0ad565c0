"""A head turns features into logits. It is fitted on one client's own samples, valid for one extractor, and never leaves the client.

A head is a small frozen value: NumPy is all that predicting takes, and it goes to disk as arrays and a few words, without pickle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError, DataError
from edge_fl.heads.plan import PLAIN, HeadPlan

Array = NDArray[Any]
Features = NDArray[np.float32]
Extras = Mapping[str, Mapping[str, Array]]
"""Shared parts that came with the extractor, by name: {"head": {"weight": ..., "bias": ...}}."""


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """What a head is fitted to: features z float32 [n, d] (n >= 1) with class ids y int64 [n] out of `classes`, in canonical order.

    `unit_norm`: every z has length 1. `balanced`: every class that occurs counts the same, however many samples it has. `plan` and
    `extras` are what the release says and brings for heads of its method.
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
        """A weight per sample [n], 1 on average: all 1, or n / (k * n_c) when balanced."""
        if not self.balanced:
            return np.ones(len(self.y))
        _, rows, counts = np.unique(self.y, return_inverse=True, return_counts=True)
        weights: NDArray[np.float64] = (len(self.y) / (len(counts) * counts))[rows]
        return weights


@dataclass(frozen=True, eq=False)
class Head(ABC):
    """`classes` is C, all classes of the task; `extractor` the sha256 of the extractor whose features it was fitted on ("" for none)."""

    classes: int
    extractor: str

    kind: ClassVar[str]
    shapes: ClassVar[Mapping[str, tuple[str, ...]]]
    """Its arrays by field name, each with its dimensions as letters; equal letters are equal sizes, C is `classes`."""

    @classmethod
    @abstractmethod
    def fit(cls, data: TrainingSet) -> Self:
        """The head fitted to `data`, which for all kinds but constant holds two classes or more."""

    @abstractmethod
    def logits(self, z: Features) -> Features:
        """Features z [n, d] -> logits float32 [n, C] over all classes; -inf where the head cannot know a class. Raises DataError."""

    def predict(self, z: Features) -> NDArray[np.int64]:
        """Features z [n, d] -> class ids int64 [n], the smallest of equals."""
        classes: NDArray[np.int64] = self.logits(z).argmax(axis=1).astype(np.int64)
        return classes

    def require(self, extractor: str) -> None:
        """Raises ArtefactError unless the head was fitted on the extractor with this sha256."""
        if self.extractor != extractor:
            raise ArtefactError(
                f"{self.kind} head: fitted on extractor {self.extractor[:8] or '(none)'}, asked to serve {extractor[:8] or '(none)'};"
                " not used, a new head must be fitted"
            )

    def describe(self) -> dict[str, str]:
        """What the arrays do not say: {kind, extractor, classes}; words, so that it fits into a file's metadata."""
        return {"kind": self.kind, "extractor": self.extractor, "classes": str(self.classes)}

    def to_arrays(self) -> dict[str, Array]:
        """The arrays by name; with `describe()` they are the whole head (`edge_fl.heads.from_arrays` is the inverse)."""
        return {name: getattr(self, name) for name in self.shapes}


def require_features(z: Array, dim: int, kind: str) -> None:
    """Raises DataError unless z is [n, dim]."""
    if z.ndim != 2 or z.shape[1] != dim:
        raise DataError(f"{kind} head: features of shape {list(z.shape)}, expected [n, {dim}]")


def standardisation(data: TrainingSet) -> tuple[Features, Features]:
    """Mean and std [d] of the features; a feature that does not vary gets std 1."""
    mean, std = data.z.mean(axis=0, dtype=np.float64), data.z.std(axis=0, dtype=np.float64)
    flat = std <= 1e-6 * np.maximum(np.abs(mean), 1e-6)
    return mean.astype(np.float32), np.where(flat, 1, std).astype(np.float32)


def untouched(data: TrainingSet) -> tuple[Features, Features]:
    """Mean 0 and std 1 [d]: features as they are."""
    dim = data.z.shape[1]
    return np.zeros(dim, np.float32), np.ones(dim, np.float32)
