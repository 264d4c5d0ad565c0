"""Who may use the HTTP service: programs on this device, and on other devices only clients with the token.

    FOLDER/token     the token, with mode 0600; delete the file and restart the service to get another one

On loopback, every request must name a loopback address in `Host`, so that no web site can reach the service by pointing its own name
there; elsewhere it cannot know the token. Requests that change something must carry the header HEADER, which a browser lets no other web
site send, and come from the page itself (`Origin`).
"""

from __future__ import annotations

import hmac
import secrets
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

from edge_fl.errors import InputError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.wire.host_names import is_loopback

TOKEN_FILE, COOKIE, HEADER = "token", "edge_fl_token", "X-Edge-FL"
TOKEN_BYTES = 24
MAX_FAILURES, FORGET_S, MAX_CLIENTS = 10, 60.0, 1000
"""Wrong tokens of one address before it has to wait, the time after which they are forgotten, and addresses remembered."""


class HttpError(Exception):
    """An answer that is an error."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class HttpAccess:
    """`token` None: every client may use the service, because it listens on loopback only. `secure`: over TLS."""

    token: str | None = None
    secure: bool = False
    clock: Callable[[], float] = time.monotonic
    _failures: dict[str, list[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def require_host(self, headers: Message) -> None:
        """Raise HttpError for a request to the name of another web site. A program may leave the name out; no browser does."""
        for host in headers.get_all("Host", []) if self.token is None else ():
            if not is_loopback(_host_name(host)):
                raise HttpError(HTTPStatus.FORBIDDEN, f"Host {host[:100]!r}; expected 127.0.0.1 or localhost")

    def require_token(self, client: str, headers: Message) -> None:
        """Raise HttpError unless the request carries the token, as a bearer token or in the page's cookie."""
        if self.token is None:
            return
        now_s = self.clock()
        with self._lock:
            self._failures = {
                other: times for other, times in self._failures.items() if now_s - times[-1] < FORGET_S
            }
            failures = self._failures.get(client, [])
            if len(failures) >= MAX_FAILURES or len(self._failures) >= MAX_CLIENTS:
                raise HttpError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"{MAX_FAILURES} wrong tokens from {client}; expected the one in the device's folder, in a minute",
                )
            given = _given(headers)
            if hmac.compare_digest(given.encode(), self.token.encode()):
                self._failures.pop(client, None)
                return
            if given:
                self._failures[client] = [*failures, now_s]
        raise HttpError(
            HTTPStatus.UNAUTHORIZED, "expected the token of this device, see the address of the page"
        )

    def require_own_page(self, headers: Message, *, header: bool) -> None:
        """Raise HttpError for a request that another web site may have sent."""
        host, origin = headers.get("Host", "").lower(), headers.get("Origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise HttpError(
                HTTPStatus.FORBIDDEN, f"a request of {origin[:100]}; expected one of the page itself"
            )
        if header and HEADER not in headers:
            raise HttpError(HTTPStatus.FORBIDDEN, f"expected the header {HEADER}, which the page sends")


def token(folder: Path) -> tuple[str, bool]:
    """Return the token in a device's folder and whether it was created now. Raises InputError."""
    path = folder / TOKEN_FILE
    try:
        if path.exists() and (known := path.read_text().strip()):
            return known, False
        created = secrets.token_urlsafe(TOKEN_BYTES)
        atomic.write(path, created + "\n", private=True)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{text(path)}: {error}; expected a readable token, or a folder to create one in"
        ) from error
    return created, True


def tls(folder: Path | str) -> ssl.SSLContext | None:
    """Return a TLS server with the certificate of an identity folder; None without one. Raises ConfigError for an unusable identity."""
    from edge_fl.wire import identity  # here: its libraries take 9 MB, which a service on loopback saves

    if (found := identity.certificate_in(folder)) is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(found.folder / identity.CERT_FILE, found.folder / identity.KEY_FILE)
    return context


def _host_name(host: str) -> str:
    """The name or address of a host with or without a port; "" for one that cannot be parsed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _given(headers: Message) -> str:
    """The token of a request, or "" without one."""
    kind, _, value = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    try:
        cookie = SimpleCookie(headers.get("Cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""
