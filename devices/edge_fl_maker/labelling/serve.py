"""The service of a device: predictions and, where its data are a folder, capture and the label page with its JSON API.

    GET  /label, /label*.css, /label*.js        the page; public, it contains nothing of the device
    POST /api/label/enter                       the token as bearer token -> a cookie, so that files can be shown
    GET  /api/label/view?client=ID              -> View
    GET  /api/label/preview?name=NAME           -> the picture, or the curves or the spectrogram of a recording
    GET  /api/label/sound?name=NAME             -> the recording as WAV
    POST /api/label/label                       {client, name, version, class_name} -> ActionDone
    POST /api/label/skip, /api/label/discard    {client, name, version} -> ActionDone
    POST /api/label/examine                     {client} -> View: labels are examined, and a later view has those to look at
    POST /api/label/correct                     {client, name, version, class_name} -> ActionDone, of a label to look at
    POST /api/label/approve                     {client, name, version} -> ActionDone: the label is right
    POST /api/label/undo                        {client, action} -> View
    POST /api/label/class                       {client, name} -> View
    POST /api/label/suggestion                  {client, suggestion, class_name} -> ActionDone: all of its files are labelled
    POST /api/label/dismiss                     {client, suggestion} -> View: its files are not suggested again
    POST /frame?source=NAME                     a file, also as form data -> Added: it is in the pool

Pictures and recordings leave the device only as answers to a browser that may use this service.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_fl.console.output import print_status
from edge_fl.errors import DataError, InputError
from edge_fl.files.paths import text
from edge_fl.untrusted import NOT_JSON
from edge_fl.wire.host_names import is_loopback
from edge_fl.wire.transport import JSON
from edge_fl_devices.config import POOL, DeviceConfig
from edge_fl_devices.data import location
from edge_fl_devices.serving.show import print_model, print_promise
from edge_fl_maker import access
from edge_fl_maker.access import COOKIE, HttpAccess
from edge_fl_maker.capture.capture import Capture
from edge_fl_maker.capture.pools import Pool, Why
from edge_fl_maker.http_server import HttpAnswer, HttpRequest, Route, Routes, Service, file_in
from edge_fl_maker.labelling.learner import Learner
from edge_fl_maker.labelling.moves import Moves
from edge_fl_maker.labelling.session import LabelSession, word_of
from edge_fl_maker.labelling.suggestions import Suggestions

PAGE = Path(__file__).parent / "page"
FILES = {
    "/label": ("label.html", "text/html; charset=utf-8"),
    "/label.css": ("label.css", "text/css; charset=utf-8"),
    "/label.js": ("label.js", "text/javascript; charset=utf-8"),
    "/label_doubts.js": ("label_doubts.js", "text/javascript; charset=utf-8"),
}
MEDIA_TYPES = {".jpg": "image/jpeg", ".png": "image/png"}
SAFE = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; media-src blob:; frame-ancestors 'none'; base-uri 'none';"
    " form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SVG = {"Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"}
STATUS: dict[Why, HTTPStatus] = {
    "": HTTPStatus.CREATED,
    "duplicate": HTTPStatus.OK,
    "unusable": HTTPStatus.UNPROCESSABLE_ENTITY,
    "too soon": HTTPStatus.TOO_MANY_REQUESTS,
    "too large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "paused": HTTPStatus.SERVICE_UNAVAILABLE,
    "disk full": HTTPStatus.INSUFFICIENT_STORAGE,
    "not writable": HTTPStatus.INSUFFICIENT_STORAGE,
}
"""Status of the answer to POST /frame: whether the file was added, and why not."""


def routes(session: LabelSession, capture: Capture, access: HttpAccess, lock: threading.Lock) -> Routes:
    """Return the routes of the label page of a device; `lock` is held while a file is read, for the sake of memory."""

    def act(respond: Callable[..., Any]) -> Route:
        """Call `respond` with its parameters, all of them text, from the body.

        `client` is a random id of the page in a tab; `name` and `version` are those of the file that it shows.
        """
        fields = [(name, str) for name in signature(respond).parameters]
        kind = msgspec.defstruct("Body", fields, forbid_unknown_fields=True)
        return Route(lambda request: respond(*msgspec.structs.astuple(_body(request, kind))), own_page=True)

    def file(request: HttpRequest) -> Path:
        return session.file(request.query.get("name", ""), request.query.get("version", ""))

    def preview(request: HttpRequest) -> HttpAnswer:
        path = file(request)
        if found := session.learner.preview(path):
            return HttpAnswer(found.image, "image/svg+xml", SAFE | SVG)
        return HttpAnswer(path, MEDIA_TYPES.get(path.suffix, "text/plain"), SAFE)

    def sound(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(session.learner.sound(file(request)), "audio/wav", SAFE)

    def frame(request: HttpRequest) -> Any:
        with lock:
            added = capture.add(file_in(request), request.query.get("source", "POST /frame")[:100])
        if added.name:
            session.learner.look()
        headers = {"Retry-After": str(added.retry_s)} if added.retry_s else {}
        return HttpAnswer(msgspec.json.encode(added), JSON, headers, STATUS[added.why])

    def enter(request: HttpRequest) -> HttpAnswer:
        cookie = f"{COOKIE}={access.token}; HttpOnly; SameSite=Strict; Path=/; Max-Age=31536000"
        cookie += "; Secure" * access.secure
        return HttpAnswer(b"{}", JSON, {"Set-Cookie": cookie} if access.token else {})

    pages = {("GET", path): Route(_page(*file), public=True) for path, file in FILES.items()}
    return pages | {
        ("POST", "/api/label/enter"): Route(enter, own_page=True),
        ("GET", "/api/label/view"): Route(
            lambda request: session.view(request.query.get("client", "")), own_page=True
        ),
        ("GET", "/api/label/preview"): Route(preview, own_page=True),
        ("GET", "/api/label/sound"): Route(sound, own_page=True),
        ("POST", "/api/label/label"): act(session.label),
        ("POST", "/api/label/skip"): act(session.skip),
        ("POST", "/api/label/discard"): act(session.discard),
        ("POST", "/api/label/undo"): act(session.undo),
        ("POST", "/api/label/examine"): act(session.examine),
        ("POST", "/api/label/correct"): act(session.correct),
        ("POST", "/api/label/approve"): act(session.approve),
        ("POST", "/api/label/class"): act(session.add_class),
        ("POST", "/api/label/suggestion"): act(session.name_suggestion),
        ("POST", "/api/label/dismiss"): act(session.dismiss_suggestion),
        ("POST", "/frame"): Route(frame, own_page=True, program=True),
    }


def _page(name: str, media_type: str) -> Callable[[HttpRequest], HttpAnswer]:
    return lambda request: HttpAnswer(PAGE / name, media_type, SAFE)


def _body(request: HttpRequest, kind: type[Struct]) -> Struct:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except NOT_JSON as error:
        raise DataError(f"request: {error}; expected {', '.join(kind.__struct_fields__)}") from error


@contextmanager
def serving(
    folder: Path, config: DeviceConfig | None, host: str, port: int, options: Mapping[str, Any]
) -> Iterator[Service]:
    """Open the service of a device's folder. Labels need its settings, and `data` that is a folder.

    On other addresses than loopback it requires a token, and uses TLS if the device has an identity.
    Raises InputError for an unusable folder or address.
    """
    labels = config is not None and config.reads_folder
    allowed, tls, line = HttpAccess(), None, ""
    if not is_loopback(host):
        token, is_new = access.token(folder)
        tls = access.tls(config.broker.identity) if config else None
        allowed = HttpAccess(token, secure=tls is not None)
        line = f"#token={token}" if is_new else ""
        print_status(f"clients need the token in {text(folder / access.TOKEN_FILE)}")
        if tls is None:
            print_status("without an identity there is no TLS: others in this network can read the traffic")
    with ExitStack() as stack:
        service = stack.enter_context(
            Service(folder, port, host=host, access=allowed, tls=tls, optional=labels, **options)
        )
        name = socket.gethostname() if host == "0.0.0.0" else host
        release = service.model.extractor()
        words = f"{word_of(release[0].manifest.input.kind if release else 'picture')}s"
        address = f"{'https' if tls else 'http'}://{name}:{service.port}"
        try:
            print_model(service.predictor)
            print_promise(service.predictor)
        except InputError as error:
            print_status(f"{error.message}; label {words} to get one")
        print_status(f"{address}/predict serves {text(folder)}; stop with Ctrl-C")
        if config and labels:
            stack.enter_context(labelling(service, config))
            print_status(f"{address}/label{line} to label {words}")
        elif config is None:
            print_status(f"{text(folder)}: without settings of a device run; labels need them, or --config")
        yield service


@contextmanager
def labelling(service: Service, config: DeviceConfig) -> Iterator[LabelSession]:
    """Add the label page to a service, and capture and learn until the block ends."""
    folder, data = Path(config.folder), Path(location.parsed(config.data)[1])
    pool = Pool(folder / POOL, config.capture)
    learner = Learner(config, data, service.model, pool, service.lock)
    pool.order = learner.order
    moves = Moves(pool, data, folder)
    moves.settle()
    session = LabelSession(pool, moves, learner, Suggestions(folder))
    capture = Capture(config.capture, pool, config.budget)
    service.routes.update(routes(session, capture, service.access, service.lock))
    service.parts["capture"] = capture.status
    if remark := pool.too_small_disk():
        print_status(remark)
    learner.start()
    capture.start()
    try:
        yield session
    finally:
        capture.stop()
        learner.stop()
