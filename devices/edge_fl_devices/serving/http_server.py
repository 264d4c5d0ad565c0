"""Predictions over HTTP on loopback: POST a picture to /predict, GET /health; needs no broker.

    curl --data-binary @cat.png http://127.0.0.1:8000/predict?top=2      (or -F file=@cat.png, multipart/form-data)
    {"name":"picture","class_id":3,"label":"cat","probability":0.93,"status":"answered","distance":0.41,"top":[...]}

Each connection has a thread, so a slow client delays no other one; one picture is predicted at a time, for the sake of memory. Errors are
answered as {"error": ...}. Runs as its own process, so that the agent stays small and a fit does not delay requests. A request after the
agent has installed a new model uses the new model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from edge_fl.errors import DataError, EdgeFLError, InputError
from edge_fl.wire.transport import JSON
from edge_fl_devices.serving.current_model import CurrentModel
from edge_fl_devices.serving.predict import MAX_PICTURE_BYTES, Prediction, Predictor

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
READ_S = 10.0
MAX_TOP = 1000
NOT_FOUND = "expected POST /predict or GET /health"


class Service:
    """HTTP server for one device's folder; `options` are those of the predictor.

    Raises InputError when the folder holds no model yet or the port is in use.
    """

    def __init__(self, folder: Path, port: int = 0, **options: Any) -> None:
        self._model = CurrentModel(folder, **options)
        self._lock = threading.Lock()
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), _handler(self))
        except OSError as error:
            raise InputError(f"port {port}: {error.strerror}; expected a free one") from error

    @property
    def port(self) -> int:
        return self._server.server_port

    def run(self) -> None:
        """Serve until `stop`."""
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """End `run`; call it from another thread."""
        self._server.shutdown()

    def health(self) -> dict[str, object]:
        """Return the served release and the kind of head."""
        model = self.predictor
        return {"release": model.manifest.release, "head": model.head.kind}

    @property
    def predictor(self) -> Predictor:
        """The model in use."""
        return self._model.current()

    def predict(self, picture: bytes, top: int | None = None) -> Prediction:
        """Predict from the bytes of a picture file. Raises DataError when they cannot be decoded."""
        with self._lock:
            return self.predictor.read_picture("picture", picture, top)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()


def _handler(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = READ_S  # per read: slower clients are disconnected
        server_version, sys_version = "edge-fl", ""
        default_request_version = (
            "HTTP/1.0"  # of a request line that cannot be parsed: its answer has headers too
        )

        def do_GET(self) -> None:
            if self.path != "/health":
                self._fail(HTTPStatus.NOT_FOUND, NOT_FOUND)
                return
            self._attempt(service.health)

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            address = urlsplit(self.path)
            top = parse_qs(address.query).get("top", [""])[-1]
            if address.path != "/predict":
                self._fail(HTTPStatus.NOT_FOUND, NOT_FOUND)
            elif top and not (top.isascii() and top.isdigit() and 0 < int(top) <= MAX_TOP):
                self._fail(HTTPStatus.BAD_REQUEST, f"top={top}; expected a number from 1 to {MAX_TOP}")
            elif not length.isascii() or not length.isdigit():
                self._fail(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
            elif int(length) > MAX_PICTURE_BYTES:
                self._fail(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes, at most {MAX_PICTURE_BYTES}"
                )
            else:
                self._predict(int(length), int(top) if top else None)

        def _predict(self, length: int, top: int | None) -> None:
            try:
                body = self.rfile.read(length)
            except TimeoutError:
                self._fail(HTTPStatus.REQUEST_TIMEOUT, f"expected {length} bytes within {READ_S:g} s each")
                return
            if len(body) < length:
                self._fail(HTTPStatus.BAD_REQUEST, f"the body ends after {len(body)} of {length} bytes")
                return
            self._attempt(lambda: service.predict(_picture(self.headers, body), top))

        def _attempt(self, respond: Callable[[], Any]) -> None:
            try:
                self._answer(HTTPStatus.OK, respond())
            except DataError as error:
                self._fail(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            except EdgeFLError as error:
                self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            except ConnectionError:
                pass  # the client has gone
            except Exception as error:  # the client gets the type; the log has the rest
                log.exception("unexpected error in a request")
                self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}; no prediction")

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """Answer the errors that the base class detects, such as an unknown method, as JSON too."""
            self._fail(HTTPStatus(code), message or HTTPStatus(code).phrase)

        def _fail(self, status: HTTPStatus, reason: str) -> None:
            self._answer(status, {"error": reason})

        def _answer(self, status: HTTPStatus, content: Any) -> None:
            payload = msgspec.json.encode(content)
            self.close_connection = True
            self.send_response(status)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(payload)))
            with suppress(ConnectionError):  # the client has gone
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(payload)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log no requests, for privacy."""

    return Handler


def _picture(headers: Message, body: bytes) -> bytes:
    """Return the body, or of multipart/form-data its first file. Raises DataError when there is none."""
    if headers.get_content_type() != "multipart/form-data":
        return body
    boundary = str(headers.get_param("boundary", "")).encode()
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary)[1:-1] if boundary else ():
        head, _, content = part.partition(b"\r\n\r\n")
        if b"filename" in head.lower():
            return content
    raise DataError("multipart/form-data without a file; expected one, as curl -F file=@cat.png sends it")
