"""From shared parts to an ONNX extractor that any device can run, checked against torch before anybody sees it.

Raw 0..1 pixels go in, features come out; normalisation and unit length are inside (METHODS.md 6.1). Opset and IR version are pinned
low, so that the older runtimes of some boards load the graph.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import onnx
import torch
from torch import Tensor, nn

from edge_fl.config import MethodSpec
from edge_fl.errors import ArtefactError, MethodError
from edge_fl.learn.tree import Parts, to_arrays, to_device
from edge_fl.methods import METHODS
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.methods.contract.tiers import head_plan
from edge_fl.release.manifest import Canary, Manifest, Precision, Variant, canary_images
from edge_fl.seeds import seed_for
from edge_fl.wire import blob, tensors
from server.release.onnx_session import Session

OPSET = 18
IR_VERSION = 10
PARITY = 1e-4  # largest absolute difference allowed between onnxruntime and torch
CANARY_IMAGES = 2
CANARY_FEATURES = 16
ROUGHNESS = 0.1  # of the largest feature: what two machines' int8 kernels may differ by


@dataclass(frozen=True)
class Exported:
    """An ONNX extractor: its bytes, its feature size, and its largest difference from torch on the check batch."""

    onnx: bytes
    feature_dim: int
    difference: float


@dataclass(frozen=True)
class QuantisedExtractor:
    """The int8 variant of an extractor, and what it costs."""

    onnx: bytes
    cosine: float
    loss: float


class Quantiser(Protocol):
    """Makes the int8 variant of an extractor, or None when it is not good enough to be published."""

    def __call__(self, onnx: bytes, classes: int, unit_norm: bool) -> QuantisedExtractor | None: ...


class _Graph(nn.Module):
    """A method's exported features as a module; the shared parts become its constants."""

    def __init__(self, method: Method, shared: Parts) -> None:
        super().__init__()
        self._method, self._shared = method, shared

    def forward(self, image: Tensor) -> Tensor:
        return steps.exported_features(self._method, self._shared, image)


def require_exportable(method: Method) -> None:
    """Raises MethodError for a method without a shared extractor, naming those that have one."""
    if not method.exports:
        able = ", ".join(sorted(name for name, other in METHODS.items() if other.exports))
        raise MethodError(
            f"{method.title} shares no extractor, so nothing can be released to head-only devices; these do: {able}"
        )


def export(method: Method, shared: Parts) -> Exported:
    """The extractor as ONNX, from parts on any device. Raises MethodError when there is none, ArtefactError when it misses parity."""
    require_exportable(method)
    method.net.to("cpu")
    graph = _Graph(method, to_device(shared, "cpu")).eval()
    batch = torch.rand(4, *method.net.input.shape, generator=torch.Generator().manual_seed(0))
    model = _trace(graph, batch)
    model.ir_version = IR_VERSION
    _without_traces(model)
    onnx.checker.check_model(model)
    payload = model.SerializeToString()
    with torch.no_grad():
        expected = graph(batch).numpy()
    found = Session(payload).run(batch.numpy())
    difference = float(np.abs(found - expected).max()) if found.shape == expected.shape else float("inf")
    if not difference <= PARITY:
        raise ArtefactError(
            f"export of {method.title}: onnxruntime differs from torch by {difference:.2e}, at most {PARITY:.0e}",
            consequence="not released",
        )
    return Exported(payload, expected.shape[1], difference)


def release(
    method: Method,
    shared: Parts,
    spec: MethodSpec,
    *,
    number: int,
    run_id: str,
    round: int,
    collect: bool = False,
    quantiser: Quantiser | None = None,
) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of a release and the payloads it names, by sha256: the extractor, and each extra part apart from it.

    With `collect` the manifest lets head-only devices send back what the method can use; `quantiser` makes the extractor's int8 variant.
    """
    exported = export(method, shared)
    extras = {
        name: tensors.pack(to_arrays({name: shared[name]}))
        for name in method.head_tier.extras
        if shared.get(name)
    }
    described = {name: blob.describe(payload) for name, payload in extras.items()}
    extractor = blob.describe(exported.onnx)
    int8 = quantiser(exported.onnx, len(spec.classes), method.unit_norm) if quantiser else None
    variants: dict[Precision, Variant] = {}
    if int8:
        canary = _canary(int8.onnx, spec, number)
        # a step of int8 rounds otherwise elsewhere
        rough = max(abs(value) for row in canary.features for value in row)
        canary = msgspec.structs.replace(canary, tolerance=min(1.0, max(canary.tolerance, ROUGHNESS * rough)))
        variants["int8"] = Variant(blob.describe(int8.onnx), canary, int8.cosine, int8.loss)
    manifest = Manifest(
        release=number,
        run_id=run_id,
        method=spec.method.name,
        round=round,
        extractor=extractor,
        feature_dim=exported.feature_dim,
        classes=list(spec.classes),
        input=spec.input,
        unit_norm=method.unit_norm,
        batch_norm=method.batch_norm.value,
        opset=OPSET,
        ir=IR_VERSION,
        canary=_canary(exported.onnx, spec, number),
        extras=described,
        heads=head_plan(method, spec.method.batch_size, collect=collect),
        variants=variants,
    )
    payloads: Mapping[str, bytes] = {described[name].sha256: payload for name, payload in extras.items()}
    others = {variants["int8"].extractor.sha256: int8.onnx} if int8 else {}
    return manifest, {extractor.sha256: exported.onnx, **others, **payloads}


def _without_traces(model: onnx.ModelProto) -> None:
    """Removes where in our source each node comes from: it names folders of this machine, and would make equal models different."""
    graph = model.graph
    del graph.metadata_props[:]
    for item in (*graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        del item.metadata_props[:]
        item.doc_string = ""


def _canary(payload: bytes, spec: MethodSpec, number: int) -> Canary:
    """The question that every device asks a new extractor, and the answer that this machine got."""
    question = Canary(seed=seed_for(spec.seed, "canary", number) % 2**31, images=CANARY_IMAGES, features=[])
    answer = Session(payload).run(canary_images(question, spec.input))[:, :CANARY_FEATURES]
    return Canary(question.seed, question.images, [[float(value) for value in row] for row in answer])


def _trace(graph: nn.Module, batch: Tensor) -> onnx.ModelProto:
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph,
                (batch,),
                dynamo=True,
                input_names=["image"],
                output_names=["features"],
                dynamic_shapes=({0: torch.export.Dim("n")},),
                opset_version=OPSET,
                verbose=False,
            )
    finally:
        quiet.setLevel(level)
    assert program is not None
    return program.model_proto
