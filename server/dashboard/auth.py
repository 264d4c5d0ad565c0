"""Who may see the dashboard: on loopback whoever is on this machine, elsewhere whoever has the token. Plain ASGI, for HTTP and web sockets.

On loopback the Host must be loopback too, so that no page from elsewhere reaches it under a name of its own (DNS rebinding); a socket that
another origin's page opens is refused everywhere. The token comes once in the address (`?token=`) and then as a cookie, or in an
`Authorization: Bearer` header, which is what Prometheus sends.
"""

from __future__ import annotations

from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

COOKIE = "edge_fl_token"
REFUSED = (
    b"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    b"<meta name=color-scheme content='light dark'><title>edge-fl</title>"
    b"<body style='font:15px/1.5 system-ui,sans-serif;max-width:34em;margin:18vh auto;padding:0 20px'>"
    b"<h1 style='font-size:19px;margin:0 0 8px'>This dashboard needs its token</h1>"
    b"<p style='margin:0'>Open the address that <code>edge-fl server dashboard</code> printed, the one with <code>?token=</code>.</p>"
)


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class TokenAuth:
    """Passes on what may see `app`; with an empty token only requests that were made to loopback."""

    def __init__(self, app: Any, token: str = "") -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._same_origin(headers) or not self._known_host(headers):
            await _refuse(scope, send, 403, b"not from here\n", "text/plain")
        elif self._token and self._in_address(scope):
            await _enter(scope, send, self._token)
        elif self._token and not self._shown(headers):
            await _refuse(scope, send, 401, REFUSED, "text/html; charset=utf-8")
        else:
            await self._app(scope, receive, send)

    def _known_host(self, headers: dict[str, str]) -> bool:
        return bool(self._token) or is_loopback(urlsplit(f"//{headers.get('host', '')}").hostname or "")

    def _same_origin(self, headers: dict[str, str]) -> bool:
        origin = headers.get("origin", "")
        return not origin or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()

    def _in_address(self, scope: dict[str, Any]) -> bool:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        return scope["type"] == "http" and _equal(given, self._token)

    def _shown(self, headers: dict[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        return _equal(cookie.value if cookie else "", self._token) or _equal(bearer, self._token)


def _equal(given: str, token: str) -> bool:
    return bool(given) and compare_digest(given.encode(), token.encode())


async def _enter(scope: dict[str, Any], send: Any, token: str) -> None:
    """The token becomes a cookie and leaves the address, where it would be seen and kept."""
    asked = parse_qs(scope["query_string"].decode("latin-1"))
    rest = urlencode({name: values[0] for name, values in asked.items() if name != "token"})
    location = "/" + scope["path"].lstrip("/") + (f"?{rest}" if rest else "")
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict{secure}"
    headers = [(b"location", location.encode("latin-1", "ignore")), (b"set-cookie", cookie.encode())]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(scope: dict[str, Any], send: Any, status: int, body: bytes, kind: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
