"""The operations of a head as plain data, from which an export makes ONNX nodes: a device has no package onnx.

Operators and attributes are those of ONNX from opset 7 to `edge_fl.release.onnx_form.OPSET`, so that a graph can be added to any extractor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
PREFIX = "edge_fl_"
"""Begins the names of the values that a graph adds."""


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

    def columns(self, value: str, start: int, end: int) -> str:
        """value[:, start:end]."""
        return self.node("Slice", value, *(self.constant(np.array([at])) for at in (start, end, 1)))

    def _name(self) -> str:
        return f"{PREFIX}{len(self.nodes) + len(self.constants) + 1}"
