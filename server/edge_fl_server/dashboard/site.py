"""The dashboard's pages in NiceGUI: routes, and the frame around each page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi import Request
from nicegui import ui

from edge_fl_server.dashboard.live import Address, Board, PageContext
from edge_fl_server.dashboard.pages import data, device, fleet, log, releases, run
from edge_fl_server.report.formatting import escape

FOLDER = Path(__file__).parent
MENU = {"/": "Fleet", "/run": "Runs", "/releases": "Releases", "/data": "Data", "/log": "Log"}
Build = Callable[[Board, Address], None]
ROUTES: dict[str, tuple[str, Build]] = {
    "/": ("/", fleet.build),
    "/device/{id}": ("/", device.build),
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
        address = {**request.query_params, **request.path_params}
        with _frame(context, entry, str(address.get("id", MENU[entry]))):
            board = Board(context)
            parts(board, address)
            await board.start()

    return page


@contextmanager
def _frame(context: PageContext, entry: str, title: str) -> Iterator[None]:
    ui.add_head_html(f"<style>{(FOLDER / 'style.css').read_text()}</style>")
    ui.add_head_html(f"<script>{(FOLDER / 'script.js').read_text()}</script>")
    ui.page_title(f"{title} · edge-fl")
    links = "".join(
        f'<a href="{path}"{" aria-current=page" if path == entry else ""}>{name}</a>'
        for path, name in MENU.items()
    )
    ui.html(
        f'<a class="skip" href="#main">Skip to content</a><header class="top"><a class="brand" href="/">edge-fl</a>'
        f'<nav aria-label="Pages">{links}</nav><span class="fleet">fleet {escape(context.fleet)}</span>'
        '<button class="plain" data-theme-button>◐</button></header>',
        sanitize=False,
    )
    with ui.element("div").props("id=main"):  # inside NiceGUI's <main>
        yield
