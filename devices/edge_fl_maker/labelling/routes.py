"""The routes of the label page: its files, its JSON API below /api/label, and POST /frame, which adds a picture to the pool.

    GET  /label, /label.css, /label.js          the page; public, it contains nothing of the device
    POST /api/label/enter                       the token as bearer token -> a cookie, so that pictures can be shown
    GET  /api/label/view?client=ID              -> View
    GET  /api/label/picture?name=NAME           -> the picture
    POST /api/label/label                       {client, name, class_name} -> ActionDone
    POST /api/label/skip, /api/label/discard    {client, name} -> ActionDone
    POST /api/label/undo                        {client, action} -> View
    POST /api/label/class                       {client, name} -> View
    POST /frame?source=NAME                     a picture file, also as form data -> Added

Pictures leave the device only as answers to a browser that may use this service.
"""

import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from edge_fl.errors import DataError
from edge_fl.untrusted import NOT_JSON
from edge_fl.wire.transport import JSON
from edge_fl_maker.access import COOKIE, HttpAccess
from edge_fl_maker.capture.capture import Capture
from edge_fl_maker.capture.pool import Why
from edge_fl_maker.http_server import HttpAnswer, HttpRequest, Route, Routes, picture_in
from edge_fl_maker.labelling.session import LabelSession

PAGE = Path(__file__).parent / "page"
FILES = {
    "/label": ("label.html", "text/html; charset=utf-8"),
    "/label.css": ("label.css", "text/css; charset=utf-8"),
    "/label.js": ("label.js", "text/javascript; charset=utf-8"),
}
MEDIA_TYPES = {".jpg": "image/jpeg", ".png": "image/png"}
SAFE = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
STATUS: dict[Why, HTTPStatus] = {
    "": HTTPStatus.CREATED,
    "duplicate": HTTPStatus.OK,
    "not a picture": HTTPStatus.UNPROCESSABLE_ENTITY,
    "too soon": HTTPStatus.TOO_MANY_REQUESTS,
    "too large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "paused": HTTPStatus.SERVICE_UNAVAILABLE,
    "disk full": HTTPStatus.INSUFFICIENT_STORAGE,
    "not writable": HTTPStatus.INSUFFICIENT_STORAGE,
}
"""Status of the answer to POST /frame: whether the picture was added, and why not."""

T = TypeVar("T", bound=Struct)


class PictureAction(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of skip and discard; `client` is a random id of the page in a tab, name and version are those of the picture that it shows."""

    client: str
    name: str
    version: str


class LabelAction(PictureAction, frozen=True, forbid_unknown_fields=True):
    """Body of label."""

    class_name: str


class UndoAction(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of undo."""

    client: str
    action: str


class ClassAction(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of class."""

    client: str
    name: str


def routes(session: LabelSession, capture: Capture, access: HttpAccess, lock: threading.Lock) -> Routes:
    """Return the routes of the label page of a device; `lock` is held while a picture is decoded, for the sake of memory."""

    def act(kind: type[T], respond: Callable[[T], Any]) -> Route:
        return Route(lambda request: respond(_body(request, kind)), own_page=True)

    def picture(request: HttpRequest) -> HttpAnswer:
        path = session.picture(request.query.get("name", ""), request.query.get("version", ""))
        return HttpAnswer(path, MEDIA_TYPES[path.suffix], SAFE)

    def frame(request: HttpRequest) -> Any:
        with lock:
            added = capture.add(picture_in(request), request.query.get("source", "POST /frame")[:100])
        if added.name:
            session.learner.look()
        return HttpAnswer(msgspec.json.encode(added), JSON, status=STATUS[added.why])

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
        ("GET", "/api/label/picture"): Route(picture, own_page=True),
        ("POST", "/api/label/label"): act(
            LabelAction, lambda body: session.label(body.client, body.name, body.version, body.class_name)
        ),
        ("POST", "/api/label/skip"): act(
            PictureAction, lambda body: session.skip(body.client, body.name, body.version)
        ),
        ("POST", "/api/label/discard"): act(
            PictureAction, lambda body: session.discard(body.client, body.name, body.version)
        ),
        ("POST", "/api/label/undo"): act(UndoAction, lambda body: session.undo(body.client, body.action)),
        ("POST", "/api/label/class"): act(
            ClassAction, lambda body: session.add_class(body.client, body.name)
        ),
        ("POST", "/frame"): Route(frame, own_page=True, program=True),
    }


def _page(name: str, media_type: str) -> Callable[[HttpRequest], HttpAnswer]:
    return lambda request: HttpAnswer(PAGE / name, media_type, SAFE)


def _body(request: HttpRequest, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except NOT_JSON as error:
        raise DataError(f"request: {error}; expected {', '.join(kind.__struct_fields__)}") from error
