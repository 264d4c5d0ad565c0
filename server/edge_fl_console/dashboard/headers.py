"""Headers of every response of the dashboard, and its pages for errors, as ASGI middleware.

Other sites may not frame a page, and only its own scripts run: they carry a number used once, which `Nonces` adds to NiceGUI's markup. A
script in a text of a device has none, and an attribute such as `onerror` cannot have one, so neither runs. NiceGUI compiles templates in
the browser ('unsafe-eval') and sets styles in attributes.
"""

import logging
import re
import secrets

from starlette.datastructures import Headers as RequestHeaders
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_fl_console.dashboard.plain import failure

log = logging.getLogger(__name__)

NONCE = "edge_fl.nonce"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'nonce-{nonce}' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
SAFE = {
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # not "no-referrer": the sign-in form would be sent without its origin
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
SCRIPT = re.compile(rb"<script(?=[\s>])")


class Headers:
    """Adds the headers to all responses of `app`; a browser that asked for a page gets errors as pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        nonce, started, failed = secrets.token_urlsafe(16), False, 0
        is_page = "text/html" in RequestHeaders(scope=scope).get("accept", "")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update({**SAFE, "content-security-policy": POLICY.format(nonce=nonce)})
            await send(message)

        async def send_unless_failed(message: Message) -> None:
            nonlocal started, failed
            if message["type"] == "http.response.start" and is_page:
                failed = _failure(message)
            if not failed:
                started = True
                await send_with_headers(message)

        try:
            await self._app({**scope, NONCE: nonce}, receive, send_unless_failed)
        except Exception:
            if started:
                raise
            log.exception("dashboard: a request failed")
            failed = 500
        if failed:
            plain = PlainTextResponse("internal error\n", failed)
            await (failure(failed, nonce) if is_page else plain)(scope, receive, send_with_headers)


def _failure(start: Message) -> int:
    """The status of a response that is an error without a page of ours; 0 for all others."""
    status, kind = start["status"], MutableHeaders(scope=start).get("content-type", "")
    return int(status) if status >= 500 or (status >= 400 and not kind.startswith("text/html")) else 0


class Nonces:
    """Adds the number of `Headers` to the scripts of each page of `app`, which must not be compressed yet."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or NONCE not in scope:
            await self._app(scope, receive, send)
            return
        held: list[Message] = []  # the beginning of a page, whose length changes

        async def send_with_nonce(message: Message) -> None:
            if message["type"] == "http.response.start":
                kind = MutableHeaders(scope=message).get("content-type", "")
                if kind.startswith("text/html"):
                    held.append(message)
                    return
            elif held and message["type"] == "http.response.body":
                start = held.pop()
                if not message.get("more_body"):
                    nonce = b'<script nonce="' + scope[NONCE].encode() + b'"'
                    message = {**message, "body": SCRIPT.sub(nonce, message.get("body", b""))}
                    MutableHeaders(scope=start)["content-length"] = str(len(message["body"]))
                await send(start)
            await send(message)

        await self._app(scope, receive, send_with_nonce)
