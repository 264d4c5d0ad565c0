"""Export extractor and head as one ONNX model for other programs: `edge-fl device export model.onnx`.

Input `image` is the extractor's (of pictures 0..1); outputs are `logits` and calibrated `probabilities` over all classes. The file is
written only if its probabilities match the served model's. It contains the personal head and so reveals something about this device's data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

from edge_fl import modalities
from edge_fl.errors import ArtefactError, InputError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.heads import Head
from edge_fl.heads.head import Graph
from edge_fl.release.onnx_form import LOGITS, PARITY, PROBABILITIES, ROWS
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


def fuse(predictor: Predictor) -> bytes:
    """Return the fused model, checked against the served one. Raises InputError for a kind of head without an ONNX form."""
    model = onnx.load(predictor.extractor_path)
    graph, head = Graph(predictor.manifest.feature_dim), predictor.head
    graph.node("Identity", head.graph(graph, model.graph.output[0].name), to=LOGITS)
    calibrated = graph.node("Div", LOGITS, graph.constant(predictor.calibration.temperature))
    graph.node("Softmax", calibrated, to=PROBABILITIES, axis=1)
    for name, array in graph.constants.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for node in graph.nodes:
        model.graph.node.append(
            helper.make_node(node.operator, node.inputs, [node.output], **node.attributes)
        )
    del model.graph.output[:]
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, head.classes])
        for name in (LOGITS, PROBABILITIES)
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
    input = predictor.manifest.input
    x = modalities.of(input.kind).synthetic(input, 4, seed=0)
    session = onnxruntime.InferenceSession(payload, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    (probabilities,) = session.run([PROBABILITIES], {name: modalities.scaled(x)})
    difference = float(np.abs(probabilities - predictor.probabilities(x)).max())
    if not difference <= PARITY:
        raise ArtefactError(
            f"fused model: probabilities differ by {difference:.3g} from the served model's, tolerance {PARITY:g}",
            consequence="nothing was written",
        )
