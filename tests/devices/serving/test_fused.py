"""The pair goes out as one ONNX model that answers as the pair does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from devices.predict import Predictor
from devices.serving.fused import fuse
from edge_fl.cli import main
from edge_fl.errors import InputError
from edge_fl.release.manifest import scale
from tests.devices.images import X, Y
from tests.devices.serving.refit import refit


@pytest.mark.parametrize("kind", ["logistic", "svm", "nearest", "mlp", "constant"])
def test_the_exported_model_answers_as_the_pair_does(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refit(folder, kind, np.ones_like(Y) if kind == "constant" else Y)
    file = tmp_path / "fused.onnx"
    assert main(["device", "predict", "--export", str(file), "--dir", str(folder)]) == 0
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(["probabilities"], {"image": scale(X)})
    np.testing.assert_allclose(found, Predictor(folder).probabilities(X), atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["edge_fl.classes"] == "a,b"


def test_a_head_that_cannot_be_written_down_is_refused_by_name(folder: Path) -> None:
    predictor = Predictor(folder)
    predictor.head = SimpleNamespace(kind="gated")  # type: ignore[assignment]
    with pytest.raises(InputError, match="gated head cannot be exported"):
        fuse(predictor)
