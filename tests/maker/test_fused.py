"""The exported ONNX model has the same predictions as the served model."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self, final

import numpy as np
import onnxruntime
import pytest

from edge_fl.cli import main
from edge_fl.errors import ArtefactError, InputError
from edge_fl.heads import HEADS, KINDS, Head, HeadPlan
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.head import Features, Graph, TrainingSet
from edge_fl.modalities import scaled
from edge_fl.release.onnx_form import IMAGE, PROBABILITIES
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import Store
from edge_fl_maker.fused import fuse
from tests.devices import graphs
from tests.devices.images import X, Y
from tests.devices.serving.refit import calibrated, refit
from tests.devices.serving.test_predict import BANNED

D = graphs.DIM
RNG = np.random.default_rng(7)
EXTRAS = {
    "head": {"weight": RNG.normal(size=(2, D)), "bias": RNG.normal(size=2)},
    "policy": {
        "0.weight": RNG.normal(size=(2 * D, D)),
        "0.bias": RNG.normal(size=2 * D),
        "1.weight": RNG.normal(size=2 * D),
        "1.bias": RNG.normal(size=2 * D),
    },
}
OWN = tuple(HEADS)
ADAPTED = {"fleet": "logistic", "fleet-mlp": "mlp", "fleet-cosine": "logistic"}
"""Kinds that a device makes of the fleet's head, and the kind that it is configured for."""


def of_fleet(kind: str) -> dict[str, object]:
    """Plan and extras of a release with a fleet's head on features, or one of class statistics on directions."""
    if kind != "fleet-cosine":
        return {"plan": HeadPlan(fleet="head"), "extras": EXTRAS}
    z = np.abs(scaled(X).reshape(12, -1) @ graphs.WEIGHTS)
    statistics = sums.of(z.astype(np.float32), Y, 2).arrays()
    return {"plan": HeadPlan("cosine", fleet=PRIOR), "extras": {PRIOR: statistics}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_model_answers_as_the_pair_does(kind: str, folder: Path, tmp_path: Path) -> None:
    if kind in OWN:
        refit(folder, kind, np.ones_like(Y) if kind == "constant" else Y)
    elif kind in ADAPTED:
        refit(folder, ADAPTED[kind], **of_fleet(kind))
    else:  # found as the release's method finds it
        refit(folder, "logistic", plan=HeadPlan(kind, start="head"), extras=EXTRAS)
    (stored,) = Store(folder).heads()
    Store(folder).keep_head(replace(stored, calibration=calibrated(temperature=1.7)))
    predictor, file = Predictor(folder), tmp_path / "fused.onnx"
    assert predictor.head.kind == kind
    assert main(["device", "export", str(file), "--dir", str(folder)]) == 0
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(["probabilities"], {"image": scaled(X)})
    np.testing.assert_allclose(found, predictor.probabilities(X), atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["edge_fl.classes"] == "a,b"


def test_without_the_package_onnx_the_export_says_so_and_a_copied_folder_can_be_exported_elsewhere(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "fused.onnx"
    command = [sys.executable, "-c", BANNED, "device", "export", str(file), "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4 and not file.exists()
    assert "the package onnx is not installed" in done.stderr and "copy the device's folder" in done.stderr
    assert "pip install" not in done.stderr  # a flashed Pi has no pip
    folder.rename(tmp_path / "copy")
    assert main(["device", "export", str(file), "--dir", str(tmp_path / "copy")]) == 0


@dataclass(frozen=True, eq=False)
class Brightest(Head):
    """A head of another package: the first features as logits."""

    kind: ClassVar[str] = "brightest"
    shapes: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        return cls(data.classes, data.extractor)

    def logits(self, z: Features) -> Features:
        return z[:, : self.classes]


@final
class Exportable(Brightest):
    """The same with its operations."""

    def graph(self, graph: Graph, z: str) -> str:
        return graph.columns(z, 0, self.classes)


@final
class Wrong(Brightest):
    """The same with other operations than `logits`."""

    def graph(self, graph: Graph, z: str) -> str:
        return graph.columns(z, 1, 1 + self.classes)


def test_a_new_kind_of_head_is_exported_by_its_own_class(folder: Path) -> None:
    predictor = Predictor(folder)
    predictor.head = Exportable(2, predictor.manifest.extractor.sha256)
    session = onnxruntime.InferenceSession(fuse(predictor), providers=["CPUExecutionProvider"])
    (found,) = session.run([PROBABILITIES], {IMAGE: scaled(X)})
    np.testing.assert_allclose(found, predictor.probabilities(X), atol=1e-5)
    predictor.head = Wrong(2, predictor.manifest.extractor.sha256)
    with pytest.raises(ArtefactError, match="probabilities differ"):
        fuse(predictor)


def test_a_head_without_operations_is_rejected_by_name(folder: Path) -> None:
    predictor = Predictor(folder)
    predictor.head = Brightest(2, predictor.manifest.extractor.sha256)
    with pytest.raises(InputError, match="brightest head cannot be exported"):
        fuse(predictor)
