"""Export extractor and head as one ONNX model for other programs: `edge-fl device export model.onnx`.

Input `image` is the extractor's (pixels 0..1); outputs are `logits` and calibrated `probabilities` over all classes. The file is
written only if its probabilities match the served model's. It contains the personal head and so reveals something about this device's data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import ArrayLike

from edge_fl.errors import ArtefactError, InputError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.heads import Constant, Ensemble, Gated, Head, Mlp
from edge_fl.heads.ensemble import TINY
from edge_fl.heads.gated import EPSILON
from edge_fl.heads.head import Array
from edge_fl.heads.linear import SHORTEST, Cosine, Linear
from edge_fl_devices.serving.predict import Predictor

try:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
except ModuleNotFoundError as missing:
    raise InputError(
        "device export: the package onnx is not installed, and a flashed Pi does not include it; expected a computer with"
        " edge-fl[server]: copy the device's folder there and export with --dir COPY",
        consequence="nothing was written",
    ) from missing

TOLERANCE = 1e-4
PREFIX = "edge_fl_"


class Graph:
    """Appends nodes to a model; every method takes names of values and returns the name of its result."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self._count = model, 0

    def constant(self, value: ArrayLike) -> str:
        """Add a constant: int64 stays, anything else becomes float32."""
        array = np.asarray(value)
        name, kind = self._name(), np.int64 if array.dtype == np.int64 else np.float32
        self.model.graph.initializer.append(numpy_helper.from_array(array.astype(kind), name))
        return name

    def node(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        """Add one operation."""
        name = to or self._name()
        self.model.graph.node.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def affine(self, value: str, weights: Array, bias: Array) -> str:
        """value @ weights.T + bias."""
        return self.node("Add", self.node("MatMul", value, self.constant(weights.T)), self.constant(bias))

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
        self._count += 1
        return f"{PREFIX}{self._count}"


def _linear(graph: Graph, head: Linear, z: str) -> str:
    weights = np.zeros((head.classes, len(head.mean)), np.float32)
    bias = np.full(head.classes, -np.inf, np.float32)
    weights[head.present], bias[head.present] = head.weights, head.bias
    return graph.affine(graph.standardised(z, head.mean, head.std), weights, bias)


def _cosine(graph: Graph, head: Cosine, z: str) -> str:
    dim = head.weights.shape[1]
    root = graph.node("Mul", graph.node("Sign", z), graph.node("Sqrt", graph.node("Abs", z)))
    squares = graph.node("MatMul", graph.node("Mul", root, root), graph.constant(np.ones((dim, 1))))
    length = graph.node("Max", graph.node("Sqrt", squares), graph.constant(SHORTEST))
    weights = np.zeros((head.classes, dim), np.float32)
    bias = np.full(head.classes, -np.inf, np.float32)
    weights[head.present], bias[head.present] = head.weights, head.bias
    return graph.affine(graph.node("Div", root, length), weights, bias)


def _mlp(graph: Graph, head: Mlp, z: str) -> str:
    u = graph.standardised(z, head.mean, head.std)
    hidden = graph.node("Relu", graph.affine(u, head.hidden_weights, head.hidden_bias))
    return graph.affine(hidden, head.weights, head.bias)


def _constant(graph: Graph, head: Constant, z: str, dim: int) -> str:
    bias = np.full(head.classes, -np.inf, np.float32)
    bias[head.present] = 0
    return graph.affine(z, np.zeros((head.classes, dim), np.float32), bias)


def _gated(graph: Graph, head: Gated, z: str) -> str:
    dim = len(head.context)
    context = head.context / max(float(np.linalg.norm(head.context)), 1e-12)
    scaled = graph.node("Mul", z, graph.constant(context))
    x = graph.normalised(graph.affine(scaled, head.inner, head.inner_bias), 2 * dim, EPSILON)
    x = graph.node("Add", graph.node("Mul", x, graph.constant(head.gain)), graph.constant(head.shift))
    x = graph.node("Relu", x)
    personal, shared = graph.columns(x, 0, dim), graph.columns(x, dim, 2 * dim)

    def branch(own: str, other: str, weights: Array, bias: Array) -> str:
        gate = graph.node("Sigmoid", graph.node("Sub", own, other))  # softmax over the two
        return graph.affine(graph.node("Mul", gate, z), weights, bias)

    logits = branch(personal, shared, head.weights, head.bias)
    return graph.node("Add", logits, branch(shared, personal, head.theirs, head.theirs_bias))


def _ensemble(graph: Graph, head: Ensemble, z: str) -> str:
    votes = (_mlp(graph, head.mlp, z), graph.affine(z, head.theirs, head.theirs_bias))
    both = graph.node("Add", *(graph.node("Softmax", vote, axis=1) for vote in votes))
    mean = graph.node("Mul", both, graph.constant(0.5))
    return graph.node("Log", graph.node("Add", mean, graph.constant(TINY)))


def _head(graph: Graph, head: Head, z: str, dim: int) -> str:
    """Add the head's logits. Raises InputError for a kind from another package."""
    match head:
        case Linear():
            return _linear(graph, head, z)
        case Cosine():
            return _cosine(graph, head, z)
        case Mlp():
            return _mlp(graph, head, z)
        case Constant():
            return _constant(graph, head, z, dim)
        case Gated():
            return _gated(graph, head, z)
        case Ensemble():
            return _ensemble(graph, head, z)
    raise InputError(
        f"a {head.kind} head cannot be exported: there is no ONNX for it, expected"
        " a linear, cosine, MLP, constant, gated or ensemble head"
    )


def fuse(predictor: Predictor) -> bytes:
    """Return the fused model, checked against the served one. Raises InputError for a kind of head without an ONNX form."""
    model = onnx.load(predictor.extractor_path)
    graph, head = Graph(model), predictor.head
    logits = _head(graph, head, model.graph.output[0].name, predictor.manifest.feature_dim)
    graph.node("Identity", logits, to="logits")
    calibrated = graph.node("Div", "logits", graph.constant(predictor.calibration.temperature))
    graph.node("Softmax", calibrated, to="probabilities", axis=1)
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
    """Write the fused model atomically; return its size in bytes. Raises InputError, ArtefactError."""
    payload = fuse(predictor)
    try:
        atomic.write(path, payload)
    except OSError as error:
        raise InputError(f"{text(path)}: cannot be written ({error.strerror})") from error
    return len(payload)


def _describe(predictor: Predictor, head: Head) -> dict[str, str]:
    return {
        "edge_fl.classes": ",".join(predictor.manifest.classes),
        "edge_fl.head": head.kind,
        "edge_fl.release": str(predictor.manifest.release),
        "edge_fl.extractor": head.extractor,
        "edge_fl.temperature": str(predictor.calibration.temperature),
    }


def _require_same(payload: bytes, predictor: Predictor) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, *predictor.manifest.input.shape), np.uint8)
    session = onnxruntime.InferenceSession(payload, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    (probabilities,) = session.run(["probabilities"], {name: images.astype(np.float32) / np.float32(255)})
    difference = float(np.abs(probabilities - predictor.probabilities(images)).max())
    if not difference <= TOLERANCE:
        raise ArtefactError(
            f"fused model: probabilities differ by {difference:.3g} from the served model's, tolerance {TOLERANCE:g}",
            consequence="nothing was written",
        )
