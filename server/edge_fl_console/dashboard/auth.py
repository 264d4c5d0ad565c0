"""Access to the dashboard as ASGI middleware for HTTP and web sockets: who sends a request, by token, by OIDC, or locally.

Where no login is required (on loopback), the Host header must be a loopback name, which prevents DNS rebinding; requests from another
origin are always rejected. A token is given in the form, or once in the address (`?token=`), which sets a cookie, or as `Authorization:
Bearer`, as Prometheus sends it. The pages find who it was in the request's scope, under `ACCESS`.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit

import msgspec
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from edge_fl import toml
from edge_fl.errors import ConfigError
from edge_fl.files import paths, user_text
from edge_fl.files.user_text import EncodingError
from edge_fl.logs import LogLimit
from edge_fl.wire.host_names import is_loopback
from edge_fl.wire.roles import LOCAL_USER, Person, PersonRole
from edge_fl_console.dashboard.plain import page

log = logging.getLogger(__name__)

START, RETURN = "/login/oidc", "/login/return"
SECRET = "EDGE_FL_OIDC_SECRET"
SESSION = "person"
COOKIE = "edge_fl_token"
ACCESS = "edge_fl.access"
LOGIN, LOGOUT = "/login", "/logout"
MAX_FORM_BYTES, MAX_FIELDS = 10_000, 10
FORM = (
    "<form method=post action=/login><label>Token <input type=password name=token autocomplete=current-password required autofocus></label>"
    " <button class=primary>Sign in</button></form>"
    "<p>Personal tokens: <code>edge-fl token create NAME --role viewer</code>.</p>"
)


@dataclass(frozen=True)
class PageAccess:
    """Who opened a page, and whether that still holds, which may ask the registry."""

    person: Person
    holds: Callable[[], bool] = lambda: True


LOCAL = PageAccess(Person("this machine", LOCAL_USER))
FindPerson = Callable[[str], Person | None]


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
        sign_on: "SingleSignOn | None" = None,
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


class OidcSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of `--oidc`: single sign-on with OpenID Connect (authlib), where a claim of the identity provider gives the roles.

    discovery = "https://login.example/.well-known/openid-configuration"
    client_id = "edge-fl"
    client_secret_file = "oidc-secret"     # next to this file; or EDGE_FL_OIDC_SECRET
    address = "https://fleet.example"      # of the dashboard, as browsers open it
    claim = "groups"                       # a text or a list of texts

    [roles]
    viewer = ["staff"]
    operator = ["fleet-operators"]
    """

    discovery: str
    client_id: str
    address: str
    roles: dict[PersonRole, tuple[str, ...]]
    client_secret_file: str = ""
    claim: str = "groups"
    scope: str = "openid profile email"
    hours: Annotated[float, Meta(gt=0, le=8760)] = 8.0


def oidc_settings(path: Path) -> tuple[OidcSettings, str]:
    """The settings, and the client's secret. Raises ConfigError."""
    try:
        text = user_text.read(path)
        settings = msgspec.convert(toml.parse(text, paths.text(path)), OidcSettings)
        secret = os.environ.get(SECRET, "")
        if not secret and settings.client_secret_file:
            secret = user_text.read(path.parent / settings.client_secret_file).strip()
    except (OSError, EncodingError) as error:
        raise ConfigError(
            f"--oidc {paths.text(path)}: {error}; expected a TOML file, and its client_secret_file"
        ) from error
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--oidc {paths.text(path)}: {error}; expected the settings in docs/people.md"
        ) from error
    if not secret:
        raise ConfigError(f"--oidc {paths.text(path)}: no secret; expected client_secret_file, or {SECRET}")
    for name, url in (("discovery", settings.discovery), ("address", settings.address)):
        parts = urlsplit(url)
        if not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))):
            raise ConfigError(
                f"--oidc {paths.text(path)}: {name} = {url!r}: expected https://..., or http:// on loopback"
            )
    return settings, secret


@dataclass(frozen=True)
class SignIn:
    """Who signed in, and until when (seconds since 1970)."""

    person: Person
    end_s: float


@dataclass(frozen=True)
class SingleSignOn:
    """Answers the two requests of a sign-in, and tells from the session who a request is from.

    A sign-in holds for `hours`, until its sign-out, or until the dashboard's process ends, which alone knows it (`sign_ins`, by number):
    the signed cookie has its number, so that a copy of the cookie ends with it.
    """

    settings: OidcSettings
    client: Any
    sign_ins: dict[str, SignIn] = field(default_factory=dict)
    lines: LogLimit = field(default_factory=LogLimit)

    @classmethod
    def of(cls, settings: OidcSettings, secret: str) -> "SingleSignOn":
        """The provider is asked for its metadata at the first sign-in."""
        from authlib.integrations.starlette_client import OAuth

        oauth = OAuth()
        client = oauth.register(
            "provider",
            server_metadata_url=settings.discovery,
            client_id=settings.client_id,
            client_secret=secret,
            client_kwargs={"scope": settings.scope, "code_challenge_method": "S256"},
        )
        return cls(settings, client)

    async def answer(self, request: Request) -> Response | None:
        """The response to a request of a sign-in; None for all others."""
        path = request.scope["path"]
        if path not in (START, RETURN):
            return None
        try:
            if path == START:
                address = self.settings.address.rstrip("/") + RETURN
                response: Response = await self.client.authorize_redirect(request, address)
                return response
            return self._sign_in(request, await self.client.authorize_access_token(request))
        except Exception as error:  # whatever the provider answers, and a forged return
            self.lines.write(log, logging.WARNING, "", "single sign-on: %s: %s", type(error).__name__, error)
            return page(
                "Sign-in failed",
                "<p>The identity provider did not confirm it. <a href=/>Try again</a></p>",
                403,
            )

    def access(self, request: HTTPConnection) -> PageAccess | None:
        """Who the request is from; None without a sign-in, or after its end."""
        number = str(request.session.get(SESSION, ""))
        found = self._holding(number)
        return PageAccess(found.person, lambda: self._holding(number) is not None) if found else None

    def end(self, request: HTTPConnection) -> None:
        """Sign out: the sign-in of the request's cookie, and of its copies, ends."""
        self.sign_ins.pop(str(request.session.get(SESSION, "")), None)
        request.session.clear()

    def _holding(self, number: str) -> SignIn | None:
        found = self.sign_ins.get(number)
        return found if found and time.time() < found.end_s else None

    def link(self) -> str:
        """Markup that starts a sign-in."""
        return f"<p><a href={START}>Sign in with single sign-on</a></p>"

    def _sign_in(self, request: Request, answer: dict[str, Any]) -> Response:
        claims = answer["userinfo"]
        values = claims.get(self.settings.claim, [])
        values = {values} if isinstance(values, str) else {str(value) for value in values or ()}
        roles = [role for role, accepted in self.settings.roles.items() if values & set(accepted)]
        name = str(claims.get("email") or claims.get("preferred_username") or claims["sub"])
        subject = f"{name} ({claims['sub']})" if name != claims["sub"] else name
        if not roles:
            log.warning(
                "single sign-on: %s has no role (%s = %s)", subject, self.settings.claim, sorted(values)
            )
            return page(
                "No role",
                f"<p>Signed in, but <code>{self.settings.claim}</code> gives no role here.</p>",
                403,
            )
        self.end(request)  # an earlier one of this browser
        now_s, number = time.time(), secrets.token_urlsafe(32)
        for ended in [each for each, found in self.sign_ins.items() if found.end_s <= now_s]:
            self.sign_ins.pop(ended, None)
        person = Person(subject, "single sign-on", frozenset(roles))
        self.sign_ins[number] = SignIn(person, now_s + self.settings.hours * 3600)
        request.session[SESSION] = number
        return RedirectResponse("/", 303)
