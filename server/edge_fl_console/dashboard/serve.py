"""Serve the dashboard's pages and /metrics: on loopback without a login if none is required, elsewhere with one."""

import logging
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from nicegui import app as pages
from nicegui import ui
from starlette.middleware.sessions import SessionMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from edge_fl.console.units import escape
from edge_fl.errors import ConfigError, ConnectError
from edge_fl.files.paths import text
from edge_fl.wire.host_names import is_loopback
from edge_fl.wire.roles import ACTIONS, LOCAL_USER, Person, may
from edge_fl_console import tokens
from edge_fl_console.dashboard import prometheus
from edge_fl_console.dashboard.auth import ACCESS, LOGOUT, LoginMiddleware, SingleSignOn, oidc_settings
from edge_fl_console.dashboard.context import PageContext
from edge_fl_console.dashboard.headers import Headers, Nonces
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.pages import data, device, fleet, log, overview, releases, run
from edge_fl_console.dashboard.parts import server_state
from edge_fl_console.dashboard.plain import MENU, SCRIPT, STYLE, menu
from edge_fl_server.mqtt.device_packets import one_line
from edge_fl_server.registry import Database, fleets

MIN_TOKEN = 16
MAX_TEXT = 2000  # of a text in an address; PostgreSQL does not take all characters
FAVICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'><circle cx='16' cy='16' r='5' fill='#2f7fd0'/>"
    "<g fill='none' stroke='#2f7fd0' stroke-width='2.5'><circle cx='16' cy='16' r='11' stroke-dasharray='9 5'/></g></svg>"
)
Build = Callable[[PageBoard, Address], None]
ROUTES: dict[str, tuple[str, Build]] = {
    "/": ("/", overview.build),
    "/fleet": ("/fleet", fleet.build),
    "/device/{id}": ("/fleet", device.build),
    "/run": ("/run", run.build),
    "/run/{id}": ("/run", run.build),
    "/releases": ("/releases", releases.build),
    "/data": ("/data", data.build),
    "/log": ("/log", log.build),
}
"""Path -> its entry in the menu, and the function that adds the page's parts."""


def build(context: PageContext) -> None:
    """Register every page with NiceGUI. An address without one, and a page that fails, are answered by `Headers`."""
    pages.add_exception_handler(404, lambda request, error: PlainTextResponse("not found\n", 404))
    pages.add_exception_handler(Exception, _failed)
    for path, (entry, parts) in ROUTES.items():
        ui.page(path, title="edge-fl", response_timeout=20)(_page(context, entry, parts))


def _page(context: PageContext, entry: str, parts: Build) -> Callable[[Request], Awaitable[None]]:
    async def page(request: Request) -> None:
        given = {**request.query_params, **request.path_params}
        address = {name: one_line(text[:MAX_TEXT]) for name, text in given.items()}
        board = PageBoard(replace(context, access=request.scope.get(ACCESS, context.access)))
        with _frame(board, entry, str(address.get("id", MENU[entry]))):
            parts(board, address)
            await board.start()

    return page


def _failed(request: Request, error: Exception) -> Response:
    raise error


@contextmanager
def _frame(board: PageBoard, entry: str, title: str) -> Iterator[None]:
    ui.add_head_html(f"<style>{STYLE.read_text()}</style>")
    ui.add_head_html(f"<script>{SCRIPT.read_text()}</script>")
    ui.page_title(f"{title} · edge-fl")
    fleet, person = board.context.fleet, board.context.access.person
    hidden = [f'[data-act^="{name}:"]' for name in ACTIONS if not may(person.roles, name)]
    ui.add_head_html(f"<style>{', '.join(hidden)} {{ display: none }}</style>")
    ui.html('<a class="skip" href="#main">Skip to content</a>', sanitize=False)
    with ui.element("header").classes("top"):
        ui.html(f'{menu(entry)}<span class="fleet">fleet {escape(fleet)}</span>', sanitize=False).classes(
            "parts"
        )
        state = partial(fleets.presence, board.context.db, fleet)
        board.html(state, server_state).classes("server")
        ui.html(_signed_in(person) + '<button class="plain" data-theme-button>◐</button>', sanitize=False)
    with ui.element("div").props("id=main"):  # inside NiceGUI's <main>
        board.alarm()
        yield


def _signed_in(person: Person) -> str:
    """Who is signed in, with a button to sign out; nothing where no login is required."""
    if person.known_by == LOCAL_USER:
        return ""
    roles = ", ".join(sorted(person.roles))
    return (
        f'<form class="person" method="post" action="{LOGOUT}"><span title="{escape(roles)}">{escape(person.name)}</span>'
        ' <button class="plain">Sign out</button></form>'
    )


@dataclass(frozen=True)
class DashboardSettings:
    """Registry, fleet and address of the dashboard.

    A login is required on addresses other than loopback, with a shared `token`, and on request. A shared token is generated if a login is
    required and there is no other way to sign in.
    """

    registry: str
    fleet: str = "main"
    home: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    token: str = ""
    certificate: Path | None = None
    key: Path | None = None
    login: bool = False
    oidc: Path | None = None

    def __post_init__(self) -> None:
        if self.token and len(self.token) < MIN_TOKEN:
            raise ConfigError(f"token of {len(self.token)} characters: expected at least {MIN_TOKEN}")
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("TLS: expected both a certificate and its key")
        if self.certificate and self.key:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            except OSError as error:  # ssl.SSLError is one
                raise ConfigError(
                    f"{text(self.certificate)}, {text(self.key)}: {error.strerror or error}; expected a certificate and its key (PEM)",
                    consequence="no dashboard was started",
                ) from error


def serve(settings: DashboardSettings, status: Callable[[str], None] = lambda line: None) -> None:
    """Serve until Ctrl-C; `status` receives the address as soon as it can be opened.

    Raises ConfigError, ConnectError, and InputError for a fleet that the registry does not have.
    """
    sign_on = SingleSignOn.of(*oidc_settings(settings.oidc)) if settings.oidc else None
    db = Database.existing(settings.registry)
    fleets.require(db, settings.fleet)
    required = bool(settings.login or settings.token or sign_on or not is_loopback(settings.host))
    others = any(tokens.state(token) == "valid" for token in tokens.listed(db, settings.fleet))
    token = settings.token or (secrets.token_urlsafe(24) if required and not (others or sign_on) else "")
    listener = _listen(settings.host, settings.port)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route(
        "/metrics",
        lambda: Response(prometheus.text(db, settings.fleet), media_type=prometheus.CONTENT_TYPE),
        include_in_schema=False,
    )
    build(PageContext(db, settings.fleet, settings.home, settings.registry))
    logging.getLogger("nicegui").setLevel(logging.WARNING)
    pages.add_middleware(Nonces)  # before NiceGUI's own, one of which compresses
    ui.run_with(
        app,
        title="edge-fl",
        favicon=FAVICON,
        tailwind=False,
        reconnect_timeout=10.0,
        show_welcome_message=False,
    )
    entrance: ASGIApp = LoginMiddleware(
        app, token, partial(tokens.find, db, settings.fleet), required=required, sign_on=sign_on
    )
    if sign_on:  # "lax": the browser comes from the identity provider when the session is needed first
        https = sign_on.settings.address.startswith("https:")
        key = secrets.token_urlsafe(32)
        entrance = SessionMiddleware(entrance, key, max_age=None, same_site="lax", https_only=https)
    config = uvicorn.Config(
        Headers(entrance),
        log_level="warning",
        access_log=False,
        server_header=False,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
        timeout_graceful_shutdown=2,
    )
    scheme = "https" if settings.certificate else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    status(f"{scheme}://{host}:{listener.getsockname()[1]}/{f'?token={token}' if token else ''}")
    if required and not settings.certificate and not is_loopback(settings.host):
        status(
            "warning: without TLS the token can be read on the network; give --cert and --key, or use a proxy"
        )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
        db.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConnectError(
            f"dashboard {host}:{port}: {error.strerror or error}; expected a free address",
            consequence="no dashboard was started",
        ) from error
