"""Access to the dashboard as ASGI middleware for HTTP and web sockets: local clients on loopback, clients with the token elsewhere.

Without a token the Host header must be a loopback name, which prevents DNS rebinding; requests from another origin are always rejected. The
token is given once in the address (`?token=`), which sets a cookie, or as `Authorization: Bearer`, as Prometheus sends it.
"""

from __future__ import annotations

from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

COOKIE = "edge_fl_token"
UNAUTHORISED = (
    b"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    b"<meta name=color-scheme content='light dark'><title>edge-fl</title>"
    b"<body style='font:15px/1.5 system-ui,sans-serif;max-width:34em;margin:18vh auto;padding:0 20px'>"
    b"<h1 style='font-size:19px;margin:0 0 8px'>Token required</h1>"
    b"<p style='margin:0'>Open the address with <code>?token=</code> that <code>edge-fl server dashboard</code> printed.</p>"
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

    def __init__(self, app: Any, token: str = "") -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._same_origin(headers) or not self._known_host(headers):
            await _reject(scope, send, 403, b"wrong host or origin\n", "text/plain")
        elif self._token and self._has_token(scope):
            await _set_cookie(scope, send, self._token)
        elif self._token and not self._authorised(headers):
            await _reject(scope, send, 401, UNAUTHORISED, "text/html; charset=utf-8")
        else:
            await self._app(scope, receive, send)

    def _known_host(self, headers: dict[str, str]) -> bool:
        return bool(self._token) or is_loopback(urlsplit(f"//{headers.get('host', '')}").hostname or "")

    def _same_origin(self, headers: dict[str, str]) -> bool:
        origin = headers.get("origin", "")
        return not origin or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()

    def _has_token(self, scope: dict[str, Any]) -> bool:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        return scope["type"] == "http" and _equal(given, self._token)

    def _authorised(self, headers: dict[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        return _equal(cookie.value if cookie else "", self._token) or _equal(bearer, self._token)


def _equal(given: str, token: str) -> bool:
    return bool(given) and compare_digest(given.encode(), token.encode())


async def _set_cookie(scope: dict[str, Any], send: Any, token: str) -> None:
    """Move the token from the address, which browsers store and show, to a cookie."""
    query = parse_qs(scope["query_string"].decode("latin-1"))
    rest = urlencode({name: values[0] for name, values in query.items() if name != "token"})
    location = "/" + scope["path"].lstrip("/") + (f"?{rest}" if rest else "")
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict{secure}"
    headers = [(b"location", location.encode("latin-1", "ignore")), (b"set-cookie", cookie.encode())]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _reject(scope: dict[str, Any], send: Any, status: int, body: bytes, kind: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
