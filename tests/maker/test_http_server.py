"""Predictions over HTTP and from standard input, without a broker."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from email.message import Message
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from PIL import Image, ImageFile

from edge_fl.cli import main
from edge_fl.errors import InputError
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.serving.predict import MAX_FILE_BYTES, Predictor
from edge_fl_maker.http_server import HttpRequest, Service
from tests.devices import recordings
from tests.devices.images import X, Y
from tests.devices.serving.refit import calibrated, refit


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
        thread.join(60)


def ask(
    service: Service, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict]:
    connection = HTTPConnection("127.0.0.1", service.port, timeout=60)
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
    status, health = ask(service, "GET", "/health")
    assert status == 200 and (health["release"], health["head"], health["served"]) == (
        1,
        "logistic",
        "logistic",
    )


def test_the_query_sets_the_number_of_classes_and_the_fields_are_those_of_the_predictor(
    service: Service, folder: Path
) -> None:
    assert len(ask(service, "POST", "/predict", png(0))[1]["top"]) == 1
    status, answer = ask(service, "POST", "/predict?top=2", png(0))
    (expected,) = Predictor(folder, top=2).read_file("picture", png(0))
    assert status == 200 and json.loads(msgspec.json.encode(expected)) == answer
    for top in ("0", "x", "-1"):
        assert ask(service, "POST", f"/predict?top={top}", png(0))[0] == 400


def test_a_recording_is_answered_with_a_list_of_its_windows(tmp_path: Path) -> None:
    config = DeviceConfig("watch", str(recordings.recordings(tmp_path / "data")), folder=str(tmp_path / "pi"))
    recordings.install(tmp_path / "pi", recordings.PAYLOAD, recordings.manifest())
    recordings.fit(config)
    with Service(tmp_path / "pi") as service:
        body = (tmp_path / "data" / "standing" / "3.csv").read_bytes()
        answer = service.routes["POST", "/predict"].respond(HttpRequest({}, Message(), body))
    assert [(each.name, each.label) for each in answer][1:3] == [
        ("window 1.0-2.0 s", "standing"),
        ("window 2.0-3.0 s", "standing"),
    ]


def test_a_service_with_a_promise_abstains(folder: Path) -> None:
    refit(folder, "logistic", calibration=calibrated(temperature=100.0))
    with Service(folder, promise=0.99) as service:
        (found,) = service.predict(png(0))
    assert (found.status, found.label) == ("unsure", None) and found.top[0].label == "ab"[Y[0]]


def test_a_new_model_is_used_from_the_next_request_on(service: Service, folder: Path) -> None:
    refit(folder, "nearest", 1 - Y)
    assert ask(service, "POST", "/predict", png(0))[1]["label"] == "ab"[1 - Y[0]]
    assert ask(service, "GET", "/health")[1]["head"] == "nearest"


def test_invalid_or_too_large_pictures_are_rejected_and_the_service_continues(service: Service) -> None:
    assert ask(service, "POST", "/predict", b"no picture")[0] == 422
    assert ask(service, "POST", "/elsewhere", png(0))[0] == 404
    large = {"Content-Length": str(MAX_FILE_BYTES + 1)}
    assert ask(service, "POST", "/predict", **large)[0] == 413
    assert ask(service, "POST", "/predict", **{"Content-Length": "-1"})[0] == 400
    assert ask(service, "GET", "/health")[0] == 200


def raw(service: Service, request: bytes) -> tuple[bytes, dict]:
    """Status line and JSON body of the answer to a request as sent."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    return head.splitlines()[0], json.loads(body)


def test_a_slow_client_does_not_delay_others(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as slow:
        slow.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        connection = HTTPConnection("127.0.0.1", service.port, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_a_form_with_a_file_is_accepted(service: Service) -> None:
    file = b'Content-Disposition: form-data; name="file"; filename="x.png"\r\nContent-Type: image/png\r\n\r\n'
    field = b'Content-Disposition: form-data; name="note"\r\n\r\nhello'
    kind = {"Content-Type": 'multipart/form-data; boundary="b1"'}
    form = b"--b1\r\n" + field + b"\r\n--b1\r\n" + file + png(1) + b"\r\n--b1--\r\n"
    status, answer = ask(service, "POST", "/predict", form, **kind)
    assert (status, answer["label"]) == (200, "ab"[Y[1]])
    status, answer = ask(service, "POST", "/predict", b"--b1\r\n" + field + b"\r\n--b1--\r\n", **kind)
    assert status == 422 and "without a file" in answer["error"]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"PUT /predict HTTP/1.1\r\n\r\n", b"501"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /health HTTP/9.9\r\n\r\n", b"505"),
        (b"GET /" + bytes(70_000) + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"POST /predict HTTP/1.1\r\nContent-Length: 9\r\n\r\ncut", b"400"),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", b"404"),
    ],
)
def test_every_error_is_answered_as_json(service: Service, request_: bytes, status: bytes) -> None:
    line, answer = raw(service, request_)
    assert status in line and answer["error"]


def test_an_unexpected_failure_is_answered_as_json(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(Predictor, "read_file", fail)
    status, answer = ask(service, "POST", "/predict", png(0))
    assert status == 500 and "MemoryError" in answer["error"]


@pytest.mark.parametrize(
    "error", [TypeError("of a malformed TIFF"), RuntimeError("of an AVIF"), MemoryError()]
)
def test_whatever_a_decoder_raises_is_answered_as_the_pictures_fault(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", load)
        status, answer = ask(service, "POST", "/predict", png(0))
    assert status == 422 and answer["error"].startswith("picture: ")
    assert ask(service, "POST", "/predict", png(0))[0] == 200


def test_postscript_that_is_posted_starts_no_program(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {started}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    status, answer = ask(service, "POST", "/predict", eps)
    assert status == 422 and "PostScript is not read; nothing was predicted" in answer["error"]
    assert not started.exists()


def test_a_client_that_stops_sending_gets_a_timeout(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service._server.RequestHandlerClass, "timeout", 0.2)  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert b" 408 " in answer.splitlines()[0] and b'{"error"' in answer


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
