"""Access to the dashboard as ASGI middleware for HTTP and web sockets: who sends a request, by token, by OIDC, or locally.

Where no login is required (on loopback), the Host header must be a loopback name, which prevents DNS rebinding; requests from another
origin are always rejected. A token is given in the form, or once in the address (`?token=`), which sets a cookie, or as `Authorization:
Bearer`, as Prometheus sends it. The pages find who it was in the request's scope, under `ACCESS`.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from html import escape
from typing import Protocol
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from edge_fl.wire.hosts import is_loopback
from edge_fl.wire.roles import LOCAL_USER, Person

COOKIE = "edge_fl_token"
ACCESS = "edge_fl.access"
LOGIN, LOGOUT = "/login", "/logout"
MAX_FORM_BYTES, MAX_FIELDS = 10_000, 10
PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    "<meta name=color-scheme content='light dark'><title>edge-fl</title>"
    "<body style='font:15px/1.5 system-ui,sans-serif;max-width:34em;margin:18vh auto;padding:0 20px'><main>"
    "<h1 style='font-size:19px;margin:0 0 8px'>{title}</h1>{rest}</main>"
)
FORM = (
    "<form method=post action=/login><label>Token <input type=password name=token autocomplete=current-password required autofocus></label>"
    " <button>Sign in</button></form>"
    "<p>Personal tokens: <code>edge-fl token create NAME --role viewer</code>.</p>"
)


@dataclass(frozen=True)
class PageAccess:
    """Who opened a page, and whether that still holds, which may ask the registry."""

    person: Person
    holds: Callable[[], bool] = lambda: True


LOCAL = PageAccess(Person("this machine", LOCAL_USER))
FindPerson = Callable[[str], Person | None]


class SignOn(Protocol):
    """Single sign-on (`edge_fl_console.dashboard.single_sign_on`)."""

    async def answer(self, request: Request) -> Response | None: ...

    def access(self, request: HTTPConnection) -> PageAccess | None: ...

    def end(self, request: HTTPConnection) -> None: ...

    def link(self) -> str: ...


class LoginMiddleware:
    """Passes requests of known people to `app`, and all to a loopback name where no login is `required`.

    `token` is the shared one, with all roles; `find` gives the person of a personal token.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str = "",
        find: FindPerson = lambda secret: None,
        *,
        required: bool = False,
        sign_on: SignOn | None = None,
    ) -> None:
        self._app, self._token, self._find, self._sign_on = app, token, find, sign_on
        self._required = bool(required or token or sign_on)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        response = await self._check(scope, receive)
        if response is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008)(scope, receive, send)
        else:
            response.headers["cache-control"] = "no-store"
            await response(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive) -> Response | None:
        """The response to a request that `app` must not see; None for all others."""
        request = HTTPConnection(scope)
        host, origin = request.headers.get("host", ""), request.headers.get("origin", "")
        local = is_loopback(_split(f"//{host}").hostname or "")
        if (origin and _split(origin).netloc.lower() != host.lower()) or not (self._required or local):
            return PlainTextResponse("wrong host or origin\n", 403)
        if scope["type"] == "http" and (answer := await self._answer(Request(scope, receive))):
            return answer
        access = await self._access(request)
        if access is None and not self._required:
            access = LOCAL
        if access is None:
            return self._form()
        scope[ACCESS] = access
        return None

    async def _answer(self, request: Request) -> Response | None:
        """The response to a sign-in or sign-out; None for all other requests."""
        path, given = request.scope["path"], request.query_params.get("token", "")
        if path == LOGIN and request.method == "POST":
            given = await _token_in(request)
            return (
                _with_cookie(request, given, "/")
                if await self._person(given)
                else self._form("Unknown token")
            )
        if path == LOGOUT and request.method == "POST":
            response = RedirectResponse("/", 303)
            response.delete_cookie(COOKIE)
            if self._sign_on:
                self._sign_on.end(request)
            return response
        if self._sign_on and (answer := await self._sign_on.answer(request)):
            return answer
        if given and await self._person(given):
            rest = urlencode({name: value for name, value in request.query_params.items() if name != "token"})
            path = "/" + path.lstrip("/")  # "//host" would lead elsewhere
            return _with_cookie(request, given, f"{path}?{rest}" if rest else path)
        return None

    async def _access(self, request: HTTPConnection) -> PageAccess | None:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        for secret in filter(None, (bearer, request.cookies.get(COOKIE, ""))):
            if person := await self._person(secret):
                return PageAccess(person, partial(self._holds, secret))
        return self._sign_on.access(request) if self._sign_on else None

    async def _person(self, secret: str) -> Person | None:
        if self._matches(secret):
            return Person("shared token", "the dashboard's token")
        return await asyncio.to_thread(self._find, secret) if secret else None

    def _holds(self, secret: str) -> bool:
        return self._matches(secret) or self._find(secret) is not None

    def _matches(self, given: str) -> bool:
        return bool(self._token) and compare_digest(given.encode(), self._token.encode())

    def _form(self, title: str = "Sign in") -> Response:
        link = self._sign_on.link() if self._sign_on else ""
        return page(title, link + FORM, 401)


def page(title: str, rest: str, status: int) -> Response:
    """A page of the sign-in; `rest` is markup."""
    return HTMLResponse(PAGE.format(title=escape(title), rest=rest), status)


async def _token_in(request: Request) -> str:
    """The token of the form that was sent; "" for anything else."""
    body = b""
    with suppress(ClientDisconnect):
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                return ""
    with suppress(ValueError):
        return parse_qs(body.decode(), max_num_fields=MAX_FIELDS).get("token", [""])[-1]
    return ""


def _split(address: str) -> SplitResult:
    """The parts of an address; none of one that cannot be parsed."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def _with_cookie(request: Request, token: str, target: str) -> Response:
    """Keep the token in a cookie, not in the address, which browsers store and show."""
    response = RedirectResponse(target, 303)
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure)
    return response
