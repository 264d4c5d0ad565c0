"""Single sign-on with OpenID Connect (authlib): a claim of the identity provider gives the roles.

    discovery = "https://login.example/.well-known/openid-configuration"
    client_id = "edge-fl"
    client_secret_file = "oidc-secret"     # next to this file; or EDGE_FL_OIDC_SECRET
    address = "https://fleet.example"      # of the dashboard, as browsers open it
    claim = "groups"                       # a text or a list of texts

    [roles]
    viewer = ["staff"]
    operator = ["fleet-operators"]

A sign-in holds for `hours`, until its sign-out, or until the dashboard's process ends, which alone knows it: the signed cookie has its
number, so that a copy of the cookie ends with it.
"""

import logging
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from authlib.integrations.starlette_client import OAuth
from msgspec import Meta, Struct
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from edge_fl import toml
from edge_fl.errors import ConfigError
from edge_fl.files import paths, user_text
from edge_fl.files.user_text import EncodingError
from edge_fl.log_limit import LogLimit
from edge_fl.wire.hosts import is_loopback
from edge_fl.wire.roles import Person, PersonRole
from edge_fl_console.dashboard.auth import PageAccess, page

log = logging.getLogger(__name__)

START, RETURN = "/login/oidc", "/login/return"
SECRET = "EDGE_FL_OIDC_SECRET"
SESSION = "person"


class OidcSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of `--oidc`."""

    discovery: str
    client_id: str
    address: str
    roles: dict[PersonRole, tuple[str, ...]]
    client_secret_file: str = ""
    claim: str = "groups"
    scope: str = "openid profile email"
    hours: Annotated[float, Meta(gt=0, le=8760)] = 8.0


def read(path: Path) -> tuple[OidcSettings, str]:
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
            f"--oidc {paths.text(path)}: {error}; expected the settings in docs/running-a-fleet.md"
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
    """Answers the two requests of a sign-in, and tells from the session who a request is from. `sign_ins`: those that hold, by number."""

    settings: OidcSettings
    client: Any
    sign_ins: dict[str, SignIn] = field(default_factory=dict)
    lines: LogLimit = field(default_factory=LogLimit)

    @classmethod
    def of(cls, settings: OidcSettings, secret: str) -> "SingleSignOn":
        """The provider is asked for its metadata at the first sign-in."""
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
                "Sign-in failed", "The identity provider did not confirm it. <a href=/>Try again</a>", 403
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
                "No role", f"Signed in, but <code>{self.settings.claim}</code> gives no role here.", 403
            )
        self.end(request)  # an earlier one of this browser
        now_s, number = time.time(), secrets.token_urlsafe(32)
        for ended in [each for each, found in self.sign_ins.items() if found.end_s <= now_s]:
            self.sign_ins.pop(ended, None)
        person = Person(subject, "single sign-on", frozenset(roles))
        self.sign_ins[number] = SignIn(person, now_s + self.settings.hours * 3600)
        request.session[SESSION] = number
        return RedirectResponse("/", 303)
