"""Export shared parts as an ONNX extractor, checked against torch before it is published.

Input are samples as `modalities.scaled` returns them, output are features; normalisation and unit length are part of the graph
(docs/methods-formulas.md, "Networks"). Opset and IR version are low, so that older runtimes can load the graph.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
import torch
from torch import Tensor, nn

from edge_fl import blob
from edge_fl.config import MethodSpec
from edge_fl.errors import ArtefactError, MethodError
from edge_fl.heads.fleet import FLEET
from edge_fl.heads.plan import PLAIN, HeadPlan, Serves
from edge_fl.inputs import InputSpec
from edge_fl.learn.tree import Parts, to_arrays, to_device
from edge_fl.methods import METHODS, PRETRAINED
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.methods.contract.tiers import head_plan
from edge_fl.methods.finetuned import FineTuned
from edge_fl.models import frozen
from edge_fl.release.manifests import Canary, Manifest, Precision, Variant, canary_input
from edge_fl.release.onnx_form import FEATURES, IMAGE, IR_VERSION, OPSET, PARITY, ROWS
from edge_fl.seeds import seed_for
from edge_fl.wire import tensors
from edge_fl_server.release.fleet_head import FleetExtra
from edge_fl_server.release.onnx_session import Session, quiet

CANARY_SAMPLES = 2
CANARY_FEATURES = 16
INT8_TOLERANCE = 0.1  # of the largest feature: difference between int8 kernels of different machines


@dataclass(frozen=True)
class Exported:
    """An ONNX extractor: its bytes, feature dimension, largest relative difference from torch on the check batch, and
    versions of the graph.
    """

    onnx: bytes
    feature_dim: int
    difference: float = 0.0
    opset: int = OPSET
    ir: int = IR_VERSION


class Description(NamedTuple):
    """What the manifest says of an extractor, besides what follows from its bytes. `seed` draws the canary's samples."""

    method: str
    classes: Sequence[str]
    input: InputSpec
    seed: int = 0
    unit_norm: bool = False
    batch_norm: str = "sync"
    heads: HeadPlan = PLAIN


@dataclass(frozen=True)
class QuantisedExtractor:
    """The int8 variant of an extractor: cosine of its features to the original's, and loss of accuracy."""

    onnx: bytes
    cosine: float
    loss: float


Quantiser = Callable[[bytes, int, bool], QuantisedExtractor | None]
"""(extractor, number of classes, unit_norm) -> its int8 variant; None if it does not pass the quality gate."""


class ReleaseOrigin(NamedTuple):
    """The number of a release, and the run and round it comes from."""

    number: int
    run_id: str
    round: int


class _Graph(nn.Module):
    """A method's exported features as a module; the shared parts become its constants."""

    def __init__(self, method: Method, shared: Parts) -> None:
        super().__init__()
        self._method, self._shared = method, shared

    def forward(self, x: Tensor) -> Tensor:
        return steps.exported_features(self._method, self._shared, x)


def require_exportable(method: Method) -> None:
    """Raise MethodError for a method without a shared extractor; the message names those that have one."""
    if not method.exports:
        able = ", ".join(sorted(name for name, other in METHODS.items() if other.exports))
        raise MethodError(
            f"{method.title} shares no extractor, so nothing can be released to head-only devices; methods with one: {able}"
        )


def export(method: Method, shared: Parts) -> Exported:
    """Export the extractor as ONNX. Raises MethodError if there is none, ArtefactError if it misses parity with torch."""
    require_exportable(method)
    method.net.to("cpu")
    graph = _Graph(method, to_device(shared, "cpu")).eval()
    batch = torch.from_numpy(canary_input(Canary(0, 4, []), method.net.input))
    model = _trace(_without_adapters(method, shared), batch)
    model.ir_version = IR_VERSION
    _strip_metadata(model)
    onnx.checker.check_model(model)
    payload = model.SerializeToString()
    with torch.no_grad():
        expected = graph(batch).numpy()
    features = Session(payload).run(batch.numpy())
    same_shape = features.shape == expected.shape
    largest = max(float(np.abs(expected).max()), float(np.finfo(np.float32).tiny))
    difference = float(np.abs(features - expected).max()) / largest if same_shape else float("inf")
    if not difference <= PARITY:
        raise ArtefactError(
            f"export of {method.title}: onnxruntime differs from torch by {difference:.2e} of the largest feature, at most"
            f" {PARITY:.0e}",
            consequence="not released",
        )
    return Exported(payload, expected.shape[1], difference)


def release(
    method: Method,
    shared: Parts,
    spec: MethodSpec,
    origin: ReleaseOrigin,
    *,
    collect: bool = False,
    quantiser: Quantiser | None = None,
    serves: Serves = "fleet",
    fleet: FleetExtra | None = None,
) -> tuple[Manifest, dict[str, bytes]]:
    """Make a release -> its manifest, and its payloads by sha256: the extractor, its variants, and each extra part.

    With `collect` the manifest requests head updates from devices; `quantiser` makes the extractor's int8 variant. `fleet` is the
    fleet's head that the server computed, instead of the method's; `serves` as of HeadPlan.
    """
    exported = export(method, shared)
    extras = {
        name: tensors.pack(to_arrays({name: shared[name]}))
        for name in method.head_tier.extras
        if shared.get(name)
    }
    description = describe(method, spec, collect=collect, serves=serves)
    plan = description.heads
    if plan.fleet not in extras:  # of a round before the method has one
        plan = msgspec.structs.replace(plan, fleet="")
    if fleet:
        extras[FLEET] = fleet.payload
        plan = msgspec.structs.replace(plan, fleet=FLEET, shares=fleet.shares)
    return assemble(exported, description._replace(heads=plan), origin, extras, quantiser=quantiser)


def describe(
    method: Method, spec: MethodSpec, *, collect: bool = False, serves: Serves = "fleet"
) -> Description:
    """The description of a method's extractor; with `collect` devices send head updates.

    On a backbone that was not trained as a whole, a method without a head of its own gets the cosine head (docs/models.md).
    """
    plan = head_plan(method, spec.method.batch_size, collect=collect, serves=serves)
    pretrained = spec.method.name == PRETRAINED or spec.model.train != "all"
    if pretrained and plan.way == "own" and not (plan.start or plan.uploads):
        plan = msgspec.structs.replace(plan, way="cosine")
    return Description(
        spec.method.name,
        spec.classes,
        spec.input,
        spec.seed,
        method.unit_norm,
        method.batch_norm.value,
        plan,
    )


def assemble(
    exported: Exported,
    description: Description,
    origin: ReleaseOrigin,
    extras: Mapping[str, bytes] = MappingProxyType({}),
    *,
    quantiser: Quantiser | None = None,
) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of an extractor, and the payloads by sha256 as `release`."""
    described = {name: blob.describe(payload) for name, payload in extras.items()}
    extractor = blob.describe(exported.onnx)
    seed, input = seed_for(description.seed, "canary", origin.number) % 2**31, description.input
    unit_norm = description.unit_norm
    int8 = quantiser(exported.onnx, len(description.classes), unit_norm) if quantiser else None
    variants: dict[Precision, Variant] = {}
    if int8:
        canary = _canary(int8.onnx, seed, input)
        # int8 kernels of other machines round differently
        largest = max(abs(value) for row in canary.features for value in row)
        canary = msgspec.structs.replace(
            canary, tolerance=min(1.0, max(canary.tolerance, INT8_TOLERANCE * largest))
        )
        variants["int8"] = Variant(blob.describe(int8.onnx), canary, int8.cosine, int8.loss)
    manifest = Manifest(
        release=origin.number,
        run_id=origin.run_id,
        method=description.method,
        round=origin.round,
        extractor=extractor,
        feature_dim=exported.feature_dim,
        classes=list(description.classes),
        input=input,
        unit_norm=unit_norm,
        batch_norm=description.batch_norm,
        opset=exported.opset,
        ir=exported.ir,
        canary=_canary(exported.onnx, seed, input),
        extras=described,
        heads=description.heads,
        variants=variants,
    )
    payloads: Mapping[str, bytes] = {described[name].sha256: payload for name, payload in extras.items()}
    others = {variants["int8"].extractor.sha256: int8.onnx} if int8 else {}
    return manifest, {extractor.sha256: exported.onnx, **others, **payloads}


def _strip_metadata(model: onnx.ModelProto) -> None:
    """Remove source locations: they name folders of this machine and make equal models differ."""
    graph = model.graph
    del graph.metadata_props[:]
    for item in (*graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        del item.metadata_props[:]
        item.doc_string = ""


def _canary(payload: bytes, seed: int, input: InputSpec) -> Canary:
    """The test that every device runs on a new extractor: input seed and the features computed here."""
    canary = Canary(seed=seed, images=CANARY_SAMPLES, features=[])
    features = Session(payload).run(canary_input(canary, input))[:, :CANARY_FEATURES]
    return msgspec.structs.replace(canary, features=[[float(value) for value in row] for row in features])


def _without_adapters(method: Method, shared: Parts) -> nn.Module:
    """The graph with low-rank adapters merged into the weights, so that the ONNX file is that of an ordinary network."""
    net, shared = frozen.merged(method.net, to_device(shared, "cpu"))
    plain = method.inner if isinstance(method, FineTuned) else method
    return _Graph(replace(plain, net=net), shared).eval()


def _trace(graph: nn.Module, batch: Tensor) -> onnx.ModelProto:
    """The graph of a module; kernels of small whole numbers, as random ones are, have a byte for each of them."""
    with quiet("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            graph,
            (batch,),
            dynamo=True,
            input_names=[IMAGE],
            output_names=[FEATURES],
            dynamic_shapes=({0: torch.export.Dim(ROWS)},),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.ndim > 2 and np.abs(values).max() < 128 and np.array_equal(values, np.rint(values)):
            stored = onnx.numpy_helper.from_array(values.astype(np.int8), f"{tensor.name}_int8")
            cast = onnx.helper.make_node("Cast", [stored.name], [tensor.name], to=tensor.data_type)
            tensor.CopyFrom(stored)
            model.graph.node.insert(0, cast)
    return model
