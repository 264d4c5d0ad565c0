"""The interfaces of personal heads: features to logits (`Head`), and kinds that are fitted to samples alone (`FittableHead`).

A head is a small frozen value, valid for one extractor: prediction needs NumPy only, and it is saved as arrays and strings, without pickle.
It never leaves the client. Its operations are also plain data (`Graph`), from which an export makes ONNX nodes: a device has no package
onnx. Operators and attributes are those of ONNX from opset 7 to `edge_fl.release.onnx_form.OPSET`, so that a graph can be added to any
extractor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edge_fl.errors import ArtefactError, DataError, InputError
from edge_fl.heads.plan import PLAIN, HeadPlan

PREFIX = "edge_fl_"
"""Begins the names of the values that a graph adds."""
SHORTEST = 1e-12
"""Length below which a vector has no direction."""
Array = NDArray[Any]
Features = NDArray[np.float32]
Extras = Mapping[str, Mapping[str, Array]]
"""Shared parts that come with the extractor, by name: {"head": {"weight": ..., "bias": ...}}."""


@dataclass(frozen=True)
class Node:
    """One operation: the operator's name, the names of its inputs, that of its result, and its attributes."""

    operator: str
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, Any]


@dataclass(eq=False)
class Graph:
    """The operations added to features [n, `dim`]. Each method takes names of values and returns the name of its result."""

    dim: int
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)

    def constant(self, value: ArrayLike) -> str:
        """Add a constant: int64 stays, anything else becomes float32."""
        array, name = np.asarray(value), self._name()
        self.constants[name] = array.astype(np.int64 if array.dtype == np.int64 else np.float32)
        return name

    def node(self, operator: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        """Add one operation, whose result is named `to`."""
        name = to or self._name()
        self.nodes.append(Node(operator, inputs, name, attributes))
        return name

    def affine(self, value: str, weights: Array, bias: Array) -> str:
        """value @ weights.T + bias."""
        return self.node("Add", self.node("MatMul", value, self.constant(weights.T)), self.constant(bias))

    def scattered(self, value: str, weights: Array, bias: Array, present: Array, classes: int) -> str:
        """value @ weights.T + bias for the classes `present`, -inf for the others."""
        every, logits = np.zeros((classes, self.dim)), np.full(classes, -np.inf)
        every[present], logits[present] = weights, bias
        return self.affine(value, every, logits)

    def standardised(self, value: str, mean: Array, std: Array) -> str:
        """(value - mean) / std."""
        return self.node("Div", self.node("Sub", value, self.constant(mean)), self.constant(std))

    def normalised(self, value: str, size: int, epsilon: float) -> str:
        """Normalise each row [size] to mean 0 and variance 1; by MatMul, because ReduceMean differs between opsets."""
        average = self.constant(np.full((size, 1), 1 / size))
        centred = self.node("Sub", value, self.node("MatMul", value, average))
        variance = self.node("MatMul", self.node("Mul", centred, centred), average)
        return self.node(
            "Div", centred, self.node("Sqrt", self.node("Add", variance, self.constant(epsilon)))
        )

    def direction(self, value: str) -> str:
        """The signed square root of each feature, scaled to length 1 (`edge_fl.heads.linear.direction`)."""
        root = self.node("Mul", self.node("Sign", value), self.node("Sqrt", self.node("Abs", value)))
        squares = self.node("MatMul", self.node("Mul", root, root), self.constant(np.ones((self.dim, 1))))
        length = self.node("Max", self.node("Sqrt", squares), self.constant(SHORTEST))
        return self.node("Div", root, length)

    def columns(self, value: str, start: int, end: int) -> str:
        """value[:, start:end]."""
        return self.node("Slice", value, *(self.constant(np.array([at])) for at in (start, end, 1)))

    def _name(self) -> str:
        return f"{PREFIX}{len(self.nodes) + len(self.constants) + 1}"


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Training data of a head: features z float32 [n, d] (n >= 1) and class ids y int64 [n] below `classes`, in canonical order.

    `unit_norm`: every z has length 1. `balanced`: every class present has the same weight. `plan` and `extras` come with the release, for
    heads of its method. groups int64 [n]: samples that belong together (empty: all alone). unlabelled float32 [m, d]: features of samples
    without a label, from which class shares are estimated. closed: only classes with labels are predicted, if there are any. importance
    float64 [n]: how much each sample counts where the head is measured (`edge_fl.data.grouping.Importance`).
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
    groups: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    unlabelled: Features = field(default_factory=lambda: np.empty((0, 0), np.float32))
    closed: bool = False
    importance: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

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
    """What serves: a head for C = `classes` classes; `extractor` is the sha256 of the extractor that it was fitted for ("" for none)."""

    classes: int
    extractor: str

    kind: ClassVar[str]
    shapes: ClassVar[Mapping[str, str]]
    """Arrays by field name, each with a letter per dimension; equal letters are equal sizes, C is `classes`, 1 is one."""

    @classmethod
    def of_arrays(cls, classes: int, extractor: str, arrays: Mapping[str, Array]) -> Self:
        """The head with these arrays, which have the names and `shapes` of `to_arrays()`."""
        return cls(classes, extractor, **arrays)

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


@dataclass(frozen=True, eq=False)
class FittableHead(Head):
    """A kind of head that its class fits to labelled samples, and to the extras of a release where its plan names them."""

    @classmethod
    @abstractmethod
    def fit(cls, data: TrainingSet) -> Self:
        """Fit the head to `data`, which has two or more classes except for the constant head."""


def require_features(z: Array, dim: int, kind: str) -> None:
    """Raise DataError unless z is [n, dim]."""
    if z.ndim != 2 or z.shape[1] != dim:
        raise DataError(f"{kind} head: features of shape {list(z.shape)}, expected [n, {dim}]")


def over_all(classes: int, present: Array, known: Array) -> Features:
    """Logits [n, classes] from those of the classes `present`, [n, k]; -inf for the others."""
    logits = np.full((len(known), classes), -np.inf, np.float32)
    logits[:, present] = known
    return logits


LEAST_SPREAD = 0.1
"""Of the root mean square of all features' std: a feature that hardly varies in few samples may vary in the next ones."""


def standardisation(data: TrainingSet) -> tuple[Features, Features]:
    """Mean and std [d] of the features, at least LEAST_SPREAD; std is 1 if all features are constant."""
    mean, std = data.z.mean(axis=0, dtype=np.float64), data.z.std(axis=0, dtype=np.float64)
    flat = std <= 1e-6 * np.maximum(np.abs(mean), 1e-6)
    if flat.all():
        return mean.astype(np.float32), np.ones_like(std, np.float32)
    least = LEAST_SPREAD * float(np.sqrt(np.mean(np.where(flat, 0, std) ** 2)))
    return mean.astype(np.float32), np.maximum(std, least).astype(np.float32)


def identity_scaling(data: TrainingSet) -> tuple[Features, Features]:
    """Mean 0 and std 1 [d]: no standardisation."""
    dim = data.z.shape[1]
    return np.zeros(dim, np.float32), np.ones(dim, np.float32)
