"""Extractor and head as one ONNX model, for programs that know nothing of edge-fl: `edge-fl device predict --export fused.onnx`.

Input `image` is what the extractor takes (raw pixels 0..1), outputs are `logits` and `probabilities` over all classes. The file is only
written when it answers as the pair does. It holds the personal head: whoever gets it knows something of this device's data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from devices.predict import Predictor
from edge_fl import atomic
from edge_fl.errors import ArtefactError, InputError
from edge_fl.heads import Constant, Head, Mlp
from edge_fl.heads.head import Array
from edge_fl.heads.linear import Linear

TOLERANCE = 1e-4
PREFIX = "edge_fl_"


class Graph:
    """A graph that grows at its end: every method takes the name of a value and gives the name of the next."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self._count = model, 0

    def constant(self, value: Array) -> str:
        """A tensor of its own."""
        name = self._name()
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def node(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        """One operation."""
        name = to or self._name()
        self.model.graph.node.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def affine(self, value: str, weights: Array, bias: Array, to: str = "") -> str:
        """value @ weights.T + bias."""
        product = self.node("MatMul", value, self.constant(weights.T))
        return self.node("Add", product, self.constant(bias), to=to)

    def standardised(self, value: str, mean: Array, std: Array) -> str:
        """(value - mean) / std."""
        return self.node("Div", self.node("Sub", value, self.constant(mean)), self.constant(std))

    def _name(self) -> str:
        self._count += 1
        return f"{PREFIX}{self._count}"


def _linear(graph: Graph, head: Linear, z: str) -> None:
    weights = np.zeros((head.classes, len(head.mean)), np.float32)
    bias = np.full(head.classes, -np.inf, np.float32)
    weights[head.present], bias[head.present] = head.weights, head.bias
    graph.affine(graph.standardised(z, head.mean, head.std), weights, bias, to="logits")


def _mlp(graph: Graph, head: Mlp, z: str) -> None:
    u = graph.standardised(z, head.mean, head.std)
    hidden = graph.node("Relu", graph.affine(u, head.hidden_weights, head.hidden_bias))
    graph.affine(hidden, head.weights, head.bias, to="logits")


def _constant(graph: Graph, head: Constant, z: str, dim: int) -> None:
    bias = np.full(head.classes, -np.inf, np.float32)
    bias[head.present] = 0
    graph.affine(z, np.zeros((head.classes, dim), np.float32), bias, to="logits")


def fuse(predictor: Predictor) -> bytes:
    """The pair as one model, checked against the pair. Raises InputError for a kind of head that cannot be written down."""
    model = onnx.load(predictor.extractor_path)
    graph, head = Graph(model), predictor.head
    z = model.graph.output[0].name
    match head:
        case Linear():
            _linear(graph, head, z)
        case Mlp():
            _mlp(graph, head, z)
        case Constant():
            _constant(graph, head, z, predictor.manifest.feature_dim)
        case _:
            raise InputError(
                f"a {head.kind} head cannot be exported, expected a linear one or an MLP; nothing was written"
            )
    graph.node("Softmax", "logits", to="probabilities", axis=1)
    del model.graph.output[:]
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", head.classes])
        for name in ("logits", "probabilities")
    )
    for key, value in _describe(predictor, head).items():
        model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model)
    payload: bytes = model.SerializeToString()
    _require_same(payload, predictor)
    return payload


def export(predictor: Predictor, path: Path) -> int:
    """Writes the fused model, whole or not at all; its size in bytes. Raises InputError, ArtefactError."""
    payload = fuse(predictor)
    try:
        atomic.write(path, payload)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); nothing was written") from error
    return len(payload)


def _describe(predictor: Predictor, head: Head) -> dict[str, str]:
    return {
        "edge_fl.classes": ",".join(predictor.manifest.classes),
        "edge_fl.head": head.kind,
        "edge_fl.release": str(predictor.manifest.release),
        "edge_fl.extractor": head.extractor,
    }


def _require_same(payload: bytes, predictor: Predictor) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, *predictor.manifest.input.shape), np.uint8)
    session = onnxruntime.InferenceSession(payload, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    (found,) = session.run(["probabilities"], {name: images.astype(np.float32) / np.float32(255)})
    difference = float(np.abs(found - predictor.probabilities(images)).max())
    if not difference <= TOLERANCE:
        raise ArtefactError(
            f"fused model: probabilities differ by {difference:.3g} from the pair's, tolerance {TOLERANCE:g}; nothing was written"
        )
