"""Predictions over HTTP and from standard input, without a broker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from devices.serving.http_server import Service
from devices.serving.predict import MAX_PICTURE_BYTES
from edge_fl.cli import main
from edge_fl.errors import InputError
from tests.devices.images import X, Y
from tests.devices.serving.refit import refit


def png(number: int) -> bytes:
    buffer = BytesIO()
    Image.fromarray(X[number, 0]).save(buffer, "png")
    return buffer.getvalue()


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


def test_a_picture_gets_its_class(service: Service) -> None:
    for number in range(4):
        status, answer = ask(service, "POST", "/predict", png(number))
        assert (status, answer["label"]) == (200, "ab"[Y[number]]) and 0.5 < answer["probability"] <= 1
    assert ask(service, "GET", "/health") == (200, {"release": 1, "head": "logistic"})


def test_a_new_model_is_used_from_the_next_request_on(service: Service, folder: Path) -> None:
    refit(folder, "nearest", 1 - Y)
    assert ask(service, "POST", "/predict", png(0))[1]["label"] == "ab"[1 - Y[0]]
    assert ask(service, "GET", "/health")[1]["head"] == "nearest"


def test_invalid_or_too_large_pictures_are_rejected_and_the_service_continues(service: Service) -> None:
    assert ask(service, "POST", "/predict", b"no picture")[0] == 422
    assert ask(service, "POST", "/elsewhere", png(0))[0] == 404
    large = {"Content-Length": str(MAX_PICTURE_BYTES + 1)}
    assert ask(service, "POST", "/predict", **large)[0] == 413
    assert ask(service, "POST", "/predict", **{"Content-Length": "-1"})[0] == 411
    assert ask(service, "GET", "/health")[0] == 200


def test_a_port_in_use_is_bad_input(service: Service, folder: Path) -> None:
    with pytest.raises(InputError, match=f"port {service.port}"):
        Service(folder, service.port)


def test_a_picture_may_come_through_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for payload, code in ((png(1), 0), (b"no picture", 4)):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=BytesIO(payload)))
        assert main(["device", "predict", "-", "--dir", str(folder), "--format", "json"]) == code
    output = capsys.readouterr()
    assert json.loads(output.out)[0]["label"] == "ab"[Y[1]] and "not a picture" in output.err
