"""Predictions over HTTP on loopback: POST a picture to /predict, GET /health; needs no broker.

    curl --data-binary @cat.png http://127.0.0.1:8000/predict
    {"name":"picture","class_id":3,"label":"cat","probability":0.93}

Runs as its own process, so that the agent stays small and a fit does not delay requests. A request after the agent has installed a new
model uses the new model.
"""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Self

import msgspec

from devices.serving.predict import MAX_PICTURE_BYTES, Predictor
from edge_fl.errors import DataError, EdgeFLError, InputError
from edge_fl.wire.transport import JSON

LOOPBACK = "127.0.0.1"
READ_S = 10.0
NOT_FOUND = "expected POST /predict or GET /health"
Stamp = tuple[tuple[int, int], ...]


class Service:
    """HTTP server for one device's folder. Raises InputError when it holds no model yet or the port is in use."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._folder, self._stamp = folder, _stamp(folder)
        self._predictor = Predictor(folder, remember=True)
        try:
            self._server = HTTPServer((LOOPBACK, port), _handler(self))
        except OSError as error:
            raise InputError(f"port {port}: {error.strerror}; expected a free one") from error

    @property
    def port(self) -> int:
        return self._server.server_port

    def run(self) -> None:
        """Serve one request at a time until `stop`."""
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """End `run`; call it from another thread."""
        self._server.shutdown()

    def predictor(self) -> Predictor:
        """Return the current model, or the previous one while the new one cannot be read."""
        stamp = _stamp(self._folder)
        if stamp != self._stamp:
            try:
                self._predictor, self._stamp = Predictor(self._folder, remember=True), stamp
            except EdgeFLError:
                pass  # the agent is replacing the model
        return self._predictor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()


def _handler(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = READ_S  # per read: slower clients are disconnected
        server_version, sys_version = "edge-fl", ""

        def do_GET(self) -> None:
            if self.path != "/health":
                self._fail(HTTPStatus.NOT_FOUND, NOT_FOUND)
                return
            model = service.predictor()
            self._answer(HTTPStatus.OK, {"release": model.manifest.release, "head": model.head.kind})

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if self.path != "/predict":
                self._fail(HTTPStatus.NOT_FOUND, NOT_FOUND)
            elif not length.isascii() or not length.isdigit():
                self._fail(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
            elif int(length) > MAX_PICTURE_BYTES:
                self._fail(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes, at most {MAX_PICTURE_BYTES}"
                )
            else:
                self._predict(self.rfile.read(int(length)))

        def _predict(self, picture: bytes) -> None:
            try:
                self._answer(HTTPStatus.OK, service.predictor().read_picture("picture", picture))
            except DataError as error:
                self._fail(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            except EdgeFLError as error:
                self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

        def _fail(self, status: HTTPStatus, reason: str) -> None:
            self._answer(status, {"error": reason})

        def _answer(self, status: HTTPStatus, content: Any) -> None:
            payload = msgspec.json.encode(content)
            self.close_connection = True
            self.send_response(status)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log no requests, for privacy."""

    return Handler


def _stamp(folder: Path) -> Stamp:
    """Return a value that changes when the served model may have changed."""
    files = [folder / "release" / "state.json", *sorted((folder / "heads").glob("*.safetensors"))]
    stamps = []
    for file in files:
        with suppress(OSError):
            stat = file.stat()
            stamps.append((stat.st_mtime_ns, stat.st_ino))
    return tuple(stamps)
