"""Access to the dashboard as ASGI middleware for HTTP and web sockets: local clients on loopback, clients with the token elsewhere.

Without a token the Host header must be a loopback name, which prevents DNS rebinding; requests from another origin are always rejected. The
token is given once in the address (`?token=`), which sets a cookie, or as `Authorization: Bearer`, as Prometheus sends it.
"""

from __future__ import annotations

from hmac import compare_digest
from ipaddress import ip_address
from urllib.parse import urlencode, urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

COOKIE = "edge_fl_token"
UNAUTHORISED = (
    "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    "<meta name=color-scheme content='light dark'><title>edge-fl</title>"
    "<body style='font:15px/1.5 system-ui,sans-serif;max-width:34em;margin:18vh auto;padding:0 20px'>"
    "<h1 style='font-size:19px;margin:0 0 8px'>Token required</h1>"
    "<p style='margin:0'>Open the address with <code>?token=</code> that <code>edge-fl server dashboard</code> printed.</p>"
)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is always this machine."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class TokenAuth:
    """Passes authorised requests to `app`; with an empty token these are requests to a loopback name."""

    def __init__(self, app: ASGIApp, token: str = "") -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._check(HTTPConnection(scope)) if scope["type"] in ("http", "websocket") else None
        if response is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008)(scope, receive, send)
        else:
            response.headers["cache-control"] = "no-store"
            await response(scope, receive, send)

    def _check(self, request: HTTPConnection) -> Response | None:
        """The response to a request that `app` must not see; None for all others."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin", "")
        local = is_loopback(urlsplit(f"//{host}").hostname or "")
        if (origin and urlsplit(origin).netloc.lower() != host.lower()) or not (self._token or local):
            return PlainTextResponse("wrong host or origin\n", 403)
        if not self._token:
            return None
        if request.scope["type"] == "http" and self._matches(request.query_params.get("token", "")):
            return self._with_cookie(request)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._matches(request.cookies.get(COOKIE, "")) or self._matches(bearer):
            return None
        return HTMLResponse(UNAUTHORISED, 401)

    def _matches(self, given: str) -> bool:
        return compare_digest(given.encode(), self._token.encode())

    def _with_cookie(self, request: HTTPConnection) -> Response:
        """Move the token from the address, which browsers store and show, to a cookie."""
        rest = urlencode({name: value for name, value in request.query_params.items() if name != "token"})
        path = "/" + request.scope["path"].lstrip("/")  # "//host" would lead elsewhere
        response = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", secure=secure)
        return response
