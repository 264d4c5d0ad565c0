"""Headers of every response of the dashboard, as ASGI middleware: other sites may not frame it, and only its own scripts run.

The scripts of a page carry a number used once, which `Nonces` adds to NiceGUI's markup. A script in a text of a device has none, and an
attribute such as `onerror` cannot have one, so neither runs. NiceGUI compiles templates in the browser ('unsafe-eval') and sets styles
in attributes.
"""

import logging
import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """Adds the headers to all responses of `app`, also to that of a failure."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        nonce, started = secrets.token_urlsafe(16), False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update({**SAFE, "content-security-policy": POLICY.format(nonce=nonce)})
            await send(message)

        try:
            await self._app({**scope, NONCE: nonce}, receive, send_with_headers)
        except Exception:
            if started:
                raise
            log.exception("dashboard: a request failed")
            await PlainTextResponse("internal error\n", 500)(scope, receive, send_with_headers)


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
