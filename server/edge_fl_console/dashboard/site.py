"""The dashboard's pages in NiceGUI: routes, and the frame around each page."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastapi import Request
from nicegui import ui

import edge_fl_server
from edge_fl.console.formatting import escape
from edge_fl.wire.roles import ACTIONS, LOCAL_USER, Person, may
from edge_fl_console.dashboard.auth import ACCESS, LOGOUT
from edge_fl_console.dashboard.context import PageContext
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.pages import data, device, fleet, log, overview, releases, run
from edge_fl_console.dashboard.parts import server_state
from edge_fl_server.mqtt.device_packets import one_line
from edge_fl_server.registry import fleets

FOLDER = Path(__file__).parent
STYLE = Path(edge_fl_server.__file__).with_name("style.css")  # that of reports, too
MAX_TEXT = 2000  # of a text in an address; PostgreSQL does not take all characters
MENU = {
    "/": "Overview",
    "/fleet": "Fleet",
    "/run": "Runs",
    "/releases": "Releases",
    "/data": "Data",
    "/log": "Log",
}
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
    """Register every page with NiceGUI."""
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


@contextmanager
def _frame(board: PageBoard, entry: str, title: str) -> Iterator[None]:
    ui.add_head_html(f"<style>{STYLE.read_text()}</style>")
    ui.add_head_html(f"<script>{(FOLDER / 'script.js').read_text()}</script>")
    ui.page_title(f"{title} · edge-fl")
    links = "".join(
        f'<a href="{path}"{" aria-current=page" if path == entry else ""}>{name}</a>'
        for path, name in MENU.items()
    )
    fleet, person = board.context.fleet, board.context.access.person
    hidden = [f'[data-act^="{name}:"]' for name in ACTIONS if not may(person.roles, name)]
    ui.add_head_html(f"<style>{', '.join(hidden)} {{ display: none }}</style>")
    ui.html('<a class="skip" href="#main">Skip to content</a>', sanitize=False)
    with ui.element("header").classes("top"):
        ui.html(
            f'<a class="brand" href="/">edge-fl</a><nav aria-label="Pages">{links}</nav>'
            f'<span class="fleet">fleet {escape(fleet)}</span>',
            sanitize=False,
        ).classes("parts")
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
