"""The HTTP service of a device: predictions (POST a picture to /predict, GET /health) and the routes of the label page; needs no broker.

    curl --data-binary @cat.png http://127.0.0.1:8000/predict?top=2      (or -F file=@cat.png, multipart/form-data)
    {"name":"picture","class_id":3,"label":"cat","probability":0.93,"status":"answered","distance":0.41,"top":[...]}

Each connection has a thread, so a slow client delays no other one; one picture is predicted at a time, for the sake of memory. Errors are
answered as {"error": ...}. Runs as its own process, so that the agent stays small and a fit does not delay requests. A request after the
agent has installed a new model uses the new model.
"""

from __future__ import annotations

import logging
import shutil
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, parse_qs, urlsplit

import msgspec

from edge_fl.errors import DataError, EdgeFLError, InputError
from edge_fl.modalities import ABOUT
from edge_fl.untrusted import whole
from edge_fl.wire.transport import JSON
from edge_fl_devices.serving.predict import MAX_FILE_BYTES, Prediction, Predictor
from edge_fl_maker.access import HttpAccess, HttpError
from edge_fl_maker.current_model import CurrentModel

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
READ_S = 10.0
MAX_TOP = 1000
MAX_LENGTH = 10**15
UNCACHED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True)
class HttpRequest:
    """A request: its query (the last value of each name), its headers and its body."""

    query: Mapping[str, str]
    headers: Message
    body: bytes = b""


@dataclass(frozen=True)
class HttpAnswer:
    """A file as the content of an answer, or bytes of a media type; any other value of a route is answered as JSON, with status 200."""

    content: Path | bytes
    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict)
    status: HTTPStatus = HTTPStatus.OK


@dataclass(frozen=True)
class Route:
    """How to answer a method and path: `respond` returns an `HttpAnswer`, or a value for JSON; it may raise HttpError or EdgeFLError.

    public: without the token. own_page: not for other web sites (`HttpAccess.require_own_page`). program: programs may send it, too, so it
    needs no header of the page.
    """

    respond: Callable[[HttpRequest], Any]
    public: bool = False
    own_page: bool = False
    program: bool = False


Routes = Mapping[tuple[str, str], Route]
"""Routes by method and path."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that failed outside a request, such as one that does not speak TLS, for developers only."""
        log.debug("connection of %s", client_address, exc_info=True)


class Service:
    """HTTP server for one device's folder; `options` are those of the model.

    access: for a service that listens on other addresses than loopback. tls: makes it HTTPS.
    Raises InputError when the folder holds no model yet (unless it is optional), or when the port is in use.
    """

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        host: str = LOOPBACK,
        access: HttpAccess | None = None,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self.model, self.lock = CurrentModel(folder, **options), threading.Lock()
        self.access = access or HttpAccess()
        self.parts: dict[str, Callable[[], object]] = {}
        self.routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): Route(lambda request: self.health()),
            ("POST", "/predict"): Route(self._predict),
        }
        try:
            self._server = _Server((host, port), _handler(self))
        except OSError as error:
            raise InputError(f"{host}, port {port}: {error.strerror}; expected a free one") from error
        if tls:  # the handshake takes place in the thread of its connection
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )

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
        """Return the served release, its head and accuracy with what that was measured on, and the state of each further part.

        Raises InputError without a model or parts.
        """
        states = {name: state() for name, state in self.parts.items()}
        try:
            model = self.predictor
        except InputError:
            if not states:
                raise
            return {"release": 0, "head": "", **states}
        found = model.accuracy
        measured = {
            "served": model.head_words,
            "accuracy": found.accuracy,
            "labels": found.n,
            "interval": found.interval,
            "fleet": found.fleet,
            "words": found.words,
        }
        return {"release": model.manifest.release, "head": model.head.kind, **measured, **states}

    @property
    def predictor(self) -> Predictor:
        """The model in use. Raises InputError before the first one."""
        return self.model.current()

    def predict(self, content: bytes, top: int | None = None) -> list[Prediction]:
        """Predict the samples in the bytes of a file. Raises DataError when they cannot be read."""
        with self.lock:
            predictor = self.predictor
            return predictor.read_file(ABOUT[predictor.manifest.input.kind].sample, content, top)

    def _predict(self, request: HttpRequest) -> Prediction | list[Prediction]:
        """Answer with the prediction of a picture, with a list for the samples of any other file."""
        given = request.query.get("top", "")
        top = whole(given, MAX_TOP)
        if given and not top:
            raise HttpError(
                HTTPStatus.BAD_REQUEST, f"top={given[:100]}; expected a number from 1 to {MAX_TOP}"
            )
        found = self.predict(file_in(request), top)
        return found[0] if self.predictor.manifest.input.kind == "picture" else found

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

        def parse_request(self) -> bool:
            """Parse a request; answer the errors that the base class does not expect, such as a number of thousands of digits."""
            try:
                return super().parse_request()
            except (ValueError, LookupError):
                self._fail(HTTPStatus.BAD_REQUEST, "expected headers that can be read")
                return False

        def do_GET(self) -> None:
            self._attempt(lambda: self._respond(lambda: b""))

        def do_POST(self) -> None:
            self._attempt(lambda: self._respond(self._body))

        def _respond(self, read_body: Callable[[], bytes]) -> None:
            service.access.require_host(self.headers)
            address = _split(self.path)
            route = service.routes.get((self.command, address.path))
            if route is None:
                known = ", ".join(" ".join(key) for key in service.routes)
                raise HttpError(
                    HTTPStatus.NOT_FOUND, f"{self.command} {address.path[:100]}; expected {known}"
                )
            if not route.public:
                service.access.require_token(self.client_address[0], self.headers)
            if route.own_page:
                service.access.require_own_page(
                    self.headers, header=self.command == "POST" and not route.program
                )
            query = {name: values[-1] for name, values in parse_qs(address.query).items()}
            answer = route.respond(HttpRequest(query, self.headers, read_body()))
            self._answer(answer.status if isinstance(answer, HttpAnswer) else HTTPStatus.OK, answer)

        def _body(self) -> bytes:
            given = self.headers.get("Content-Length")
            if given is None:
                raise HttpError(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
            length = whole(given, MAX_LENGTH)
            if length is None:
                raise HttpError(HTTPStatus.BAD_REQUEST, f"Content-Length {given[:100]!r}; expected a number")
            if length > MAX_FILE_BYTES:
                raise HttpError(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes, at most {MAX_FILE_BYTES}"
                )
            try:
                body = self.rfile.read(length)
            except TimeoutError as error:
                raise HttpError(
                    HTTPStatus.REQUEST_TIMEOUT, f"expected {length} bytes within {READ_S:g} s each"
                ) from error
            if len(body) < length:
                raise HttpError(HTTPStatus.BAD_REQUEST, f"the body ends after {len(body)} of {length} bytes")
            return body

        def _attempt(self, respond: Callable[[], None]) -> None:
            try:
                respond()
            except HttpError as error:
                self._fail(error.status, str(error))
            except DataError as error:
                self._fail(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            except InputError as error:  # no model yet
                self._fail(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
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

        def _answer(self, status: HTTPStatus, value: Any) -> None:
            answer = value if isinstance(value, HttpAnswer) else HttpAnswer(msgspec.json.encode(value), JSON)
            content = answer.content
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            self.close_connection = True
            self.send_response(status)
            described = {"Content-Type": answer.media_type, "Content-Length": str(size), **UNCACHED}
            for name, text in (described | dict(answer.headers)).items():
                self.send_header(name, text)
            with suppress(ConnectionError):  # the client has gone
                self.end_headers()
                if self.command == "HEAD":
                    return
                if isinstance(content, bytes):
                    self.wfile.write(content)
                else:
                    with content.open("rb") as file:
                        shutil.copyfileobj(file, self.wfile)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log no requests, for privacy."""

    return Handler


def _split(path: str) -> SplitResult:
    """The parts of a request's path. Raises HttpError."""
    try:
        return urlsplit(path)
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{path[:100]!r}: {error}; expected a path") from error


def file_in(request: HttpRequest) -> bytes:
    """Return the body, or of multipart/form-data its first file. Raises DataError when there is none."""
    headers, body = request.headers, request.body
    if headers.get_content_type() != "multipart/form-data":
        return body
    boundary = str(headers.get_param("boundary", "")).encode()
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary)[1:-1] if boundary else ():
        head, _, content = part.partition(b"\r\n\r\n")
        if b"filename" in head.lower():
            return content
    raise DataError("multipart/form-data without a file; expected one, as curl -F file=@cat.png sends it")
