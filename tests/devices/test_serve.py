"""The pair answers over HTTP and from standard input, and goes out as one ONNX model, with no broker anywhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from devices.predict import MAX_PICTURE_BYTES, Predictor
from devices.serving.fused import fuse
from devices.serving.serve import Service
from devices.store import Store, StoredHead
from edge_fl import heads
from edge_fl.cli import main
from edge_fl.errors import InputError
from edge_fl.release.manifest import scale
from tests.devices import graphs
from tests.devices.test_predict import X, Y, folder

__all__ = ["folder"]


def png(number: int) -> bytes:
    buffer = BytesIO()
    Image.fromarray(X[number, 0]).save(buffer, "png")
    return buffer.getvalue()


def refit(folder: Path, kind: str, y: np.ndarray = Y) -> None:
    """Another head in the place of the one that serves."""
    (stored,) = Store(folder).heads()
    z = scale(X).reshape(12, -1) @ graphs.WEIGHTS
    head = heads.fit(kind, z, y, 2, unit_norm=False, extractor=stored.head.extractor)
    Store(folder).keep_head(StoredHead(head, 1, stored.parcel))


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    with Service(folder) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        yield service
        service.stop()
        thread.join(10)


def ask(
    service: Service, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict]:
    connection = HTTPConnection("127.0.0.1", service.port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_a_picture_is_answered_with_its_class(service: Service) -> None:
    for number in range(4):
        status, answer = ask(service, "POST", "/predict", png(number))
        assert (status, answer["label"]) == (200, "ab"[Y[number]]) and 0.5 < answer["probability"] <= 1
    assert ask(service, "GET", "/health") == (200, {"release": 1, "head": "logistic"})


def test_a_new_pair_is_taken_up_with_the_next_request(service: Service, folder: Path) -> None:
    refit(folder, "nearest", 1 - Y)
    assert ask(service, "POST", "/predict", png(0))[1]["label"] == "ab"[1 - Y[0]]
    assert ask(service, "GET", "/health")[1]["head"] == "nearest"


def test_what_is_no_picture_or_too_large_is_refused_and_the_service_goes_on(service: Service) -> None:
    assert ask(service, "POST", "/predict", b"no picture")[0] == 422
    assert ask(service, "POST", "/elsewhere", png(0))[0] == 404
    large = {"Content-Length": str(MAX_PICTURE_BYTES + 1)}
    assert ask(service, "POST", "/predict", **large)[0] == 413
    assert ask(service, "POST", "/predict", **{"Content-Length": "-1"})[0] == 411
    assert ask(service, "GET", "/health")[0] == 200


def test_a_port_that_is_taken_is_bad_input(service: Service, folder: Path) -> None:
    with pytest.raises(InputError, match=f"port {service.port}"):
        Service(folder, service.port)


def test_a_picture_may_come_through_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for payload, code in ((png(1), 0), (b"no picture", 4)):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=BytesIO(payload)))
        assert main(["device", "predict", "-", "--dir", str(folder), "--format", "json"]) == code
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["label"] == "ab"[Y[1]] and "no picture" in said.err


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
