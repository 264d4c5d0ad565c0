"""Tiny ONNX graphs, good and malicious, with their manifests: features z = flatten(x) @ W of images [N, 1, 4, 4], d = 3."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edge_fl.blob import describe
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest, canary_input

INPUT = InputSpec((1, 4, 4))
DIM = 3
WEIGHTS = np.random.default_rng(0).normal(size=(16, DIM)).astype(np.float32)
OPSET, IR = 17, 8


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 1, 4, 4), np.uint8)


def constant(name: str, value: object, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value, dtype), name)


def graph(
    nodes: Sequence[onnx.NodeProto] = (),
    constants: Sequence[onnx.TensorProto] = (),
    *,
    weights: np.ndarray = WEIGHTS,
    opset: int = OPSET,
    ir: int = IR,
    input_shape: Sequence[object] = ("n", 1, 4, 4),
    output_shape: Sequence[object] = ("n", DIM),
    outputs: int = 1,
) -> bytes:
    """The linear extractor; `nodes` lead from its "z" to "features", or nothing does and z is the feature."""
    linear = [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["z" if nodes else "features"]),
    ]
    names = ["features"] + [f"more{i}" for i in range(1, outputs)]
    spare = [helper.make_node("Identity", ["features"], [name]) for name in names[1:]]
    model = helper.make_model(
        helper.make_graph(
            [*linear, *nodes, *spare],
            "g",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, input_shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, output_shape) for name in names],
            [numpy_helper.from_array(weights, "w"), *constants],
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=ir,
    )
    return model.SerializeToString()


def never_returns() -> bytes:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["state", "one"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["n", DIM]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, ["n", DIM]),
        ],
    )
    loop = helper.make_node("Loop", ["", "forever", "z"], ["features"], body=body)
    return graph([loop], [constant("forever", True, np.bool_), constant("one", 1.0)])


def asks_for_terabytes() -> bytes:
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["huge"]),
        helper.make_node("ReduceSum", ["huge"], ["total"], keepdims=0),
        helper.make_node("Add", ["z", "total"], ["features"]),
    ]
    return graph(nodes, [constant("size", [2**40], np.int64)])


def takes_memory(mebibytes: int) -> bytes:
    nodes = [
        helper.make_node("Expand", ["one", "size"], ["huge"]),
        helper.make_node("ReduceSum", ["huge"], ["total"], keepdims=0),
        helper.make_node("Mul", ["total", "zero"], ["nothing"]),
        helper.make_node("Add", ["z", "nothing"], ["features"]),
    ]
    size = constant("size", [mebibytes, 2**18], np.int64)
    return graph(nodes, [size, constant("one", [[1.0]]), constant("zero", 0.0)])


def gives_nan() -> bytes:
    return graph([helper.make_node("Mul", ["z", "nan"], ["features"])], [constant("nan", np.nan)])


def drops_a_feature() -> bytes:
    """Declares [n, d], any d, and gives d = 2: only running it shows."""
    node = helper.make_node("Compress", ["z", "keep"], ["features"], axis=1)
    return graph([node], [constant("keep", [True, True, False], np.bool_)], output_shape=("n", "d"))


def manifest_for(
    payload: bytes, *, release: int = 1, expected: np.ndarray | None = None, **changes: object
) -> Manifest:
    """A manifest with the linear extractor's features as canary, for any `payload`."""
    question = Canary(seed=5, images=2, features=[])
    if expected is None:
        expected = canary_input(question, INPUT).reshape(2, -1) @ WEIGHTS
    canary = Canary(5, 2, [[float(value) for value in row] for row in expected], tolerance=1e-4)
    fields = {
        "release": release,
        "run_id": "toy",
        "method": "fedavg",
        "round": 1,
        "extractor": describe(payload, 1024),
        "feature_dim": DIM,
        "classes": ["a", "b"],
        "input": INPUT,
        "unit_norm": False,
        "batch_norm": "none",
        "opset": OPSET,
        "ir": IR,
        "canary": canary,
    }
    return Manifest(**(fields | changes))


def on_disk(folder: Path, payload: bytes) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(payload)
    return path
