"""Families of pretrained networks: exported with parity, and as int8 through the gate; source of the table in docs/models.md."""

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.modalities import pictures, scaled
from edge_fl.models import backbone_input
from edge_fl.release.onnx_form import IR_VERSION, OPSET, SESSION
from edge_fl_server.recipes.recipe import QuantiseConfig
from edge_fl_server.release import export, quantise
from edge_fl_server.release.onnx_session import Session
from tests.sample import sample

FAMILIES = {  # names with the size of the input
    "efficientnet-lite0": 224,
    "timm:mobilenetv3_small_100": 224,
    "timm:mobilenetv4_conv_small": 224,
    "timm:fastvit_t8": 256,
    "timm:mobilevit_xxs": 256,
    "timm:vit_small_patch14_dinov2": 98,
    "timm:vit_medium_patch32_clip_224": 224,
}
IN_CI = ["timm:vit_small_patch14_dinov2"]  # and a smaller efficientnet-lite0
GATE = QuantiseConfig()
TRIES = 25


def exported(name: str, size: int) -> tuple[MethodSpec, export.Exported]:
    """A frozen network, with random weights except for the one whose real weights are installed."""
    weights = "random" if ":" in name else ""
    model = ModelConfig(name, {"size": size}, weights, "none")
    input = backbone_input(model)
    assert input is not None
    spec = MethodSpec(model, input, ["a", "b"], MethodConfig("fedavg"), 0)
    method = build_method(spec)
    return spec, export.export(method, steps.start(method))  # raises if it misses parity


def latencies_ms(*payloads: bytes, size: int) -> list[float]:
    """Shortest milliseconds per image of each model, in turns: the processor time of this thread, the only one, not that of others."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for key, value in SESSION.items():
        options.add_session_config_entry(key, value)
    sessions = [onnxruntime.InferenceSession(payload, options) for payload in payloads]
    image = np.random.default_rng(0).random((1, 3, size, size), np.float32)
    times: list[list[float]] = [[] for _ in payloads]
    for _ in range(TRIES):
        for session, taken in zip(sessions, times, strict=True):
            began = time.thread_time()
            session.run(None, {session.get_inputs()[0].name: image})
            taken.append(1000 * (time.thread_time() - began))
    return [min(taken) for taken in times]


def has_dot_product() -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.is_file() and "vnni" in flags.read_text()


@pytest.mark.parametrize(
    "case", ["efficientnet-lite0-small", *sample(list(FAMILIES), IN_CI, pytest.mark.slow)]
)
def test_a_family_exports_with_parity_and_passes_the_int8_gate(case: str, capsys: Any) -> None:
    name, size = (case, FAMILIES[case]) if case in FAMILIES else ("efficientnet-lite0", 96)
    spec, fp32 = exported(name, size)
    model = onnx.load_from_string(fp32.onnx)
    assert [each.version for each in model.opset_import] == [fp32.opset] == [OPSET]
    assert model.ir_version == fp32.ir == IR_VERSION and fp32.difference <= 1e-4
    images = pictures.synthetic(spec.input, 24, seed=1)
    int8 = quantise.quantise(fp32.onnx, images[:16])
    found = [Session(payload).features(images[16:]) for payload in (fp32.onnx, int8)]
    cosine = quantise._cosine(*found)
    nodes = len(model.graph.node)
    with capsys.disabled():
        ms = latencies_ms(fp32.onnx, int8, size=size)
        sys.stdout.write(
            f"\n| `{name}` | {size} | {fp32.feature_dim} | {nodes} | {fp32.difference:.0e} |"
            f" {len(fp32.onnx) / 2**20:.1f} | {len(int8) / 2**20:.1f} | {ms[0]:.1f} | {ms[1]:.1f} | {cosine:.4f} |\n"
        )
    assert cosine >= GATE.min_cosine
    assert len(int8) < 0.4 * len(fp32.onnx)
    if name == "efficientnet-lite0" and size == 224 and has_dot_product():
        assert ms[0] >= 1.5 * ms[1]


def test_fastvit_is_exported_without_its_training_branches() -> None:
    """The frozen network computes the features of the trainable one with fewer convolutions."""
    backbone = ModelConfig("timm:fastvit_t8", {"size": 64}, "random")
    input = backbone_input(backbone)
    assert input is not None
    plain, merged = (
        build_method(
            MethodSpec(
                msgspec.structs.replace(backbone, train=train), input, ["a", "b"], MethodConfig("fedavg"), 0
            )
        )
        for train in ("all", "none")
    )
    x = scaled(pictures.synthetic(plain.net.input, 2, seed=1))
    found = [
        each.net.extractor.frozen(steps.start(each)["extractor"], torch.from_numpy(x)).numpy()
        for each in (plain, merged)
    ]
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * np.abs(found[0]).max()
    convolutions = [str(each.net.extractor.build()).count("Conv2d(") for each in (plain, merged)]
    assert convolutions[1] < 0.8 * convolutions[0]
