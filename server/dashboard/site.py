"""The dashboard's pages in NiceGUI: each is a frame, a few live parts, and what its clicks mean."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request
from msgspec.structs import replace
from nicegui import ui

from edge_fl.errors import EdgeFLError
from server.dashboard.actions import ACTIONS
from server.dashboard.live import Board, Confirm
from server.dashboard.pages import data as data_page
from server.dashboard.pages import device as device_page
from server.dashboard.pages import fleet as fleet_page
from server.dashboard.pages import log as log_page
from server.dashboard.pages import releases as releases_page
from server.dashboard.pages import run as run_page
from server.dashboard.queries import data, device, fleet, log, releases, run
from server.registry import Database
from server.report.formatting import escape

FOLDER = Path(__file__).parent
PAGES = {"/": "Fleet", "/run": "Runs", "/releases": "Releases", "/data": "Data", "/log": "Log"}


@dataclass(frozen=True)
class PageContext:
    """What the pages are about: one fleet in a registry, and the folder of its releases, where it can be read."""

    db: Database
    fleet: str
    home: Path | None = None

    def kept(self) -> frozenset[int] | None:
        """The releases whose files are still there; None when nobody can tell from here."""
        folder = self.home / self.fleet if self.home else None
        if folder is None or not (folder / "metadata").is_dir():
            return None
        from server.release.repository import Repository

        try:
            return frozenset(manifest.release for manifest in Repository(folder).releases())
        except EdgeFLError:
            return None


def build(context: PageContext) -> None:
    """Makes every page known to NiceGUI."""
    for path, page in (
        ("/", _fleet),
        ("/device/{id}", _device),
        ("/run", _run),
        ("/run/{id}", _run),
        ("/releases", _releases),
        ("/data", _data),
        ("/log", _log),
    ):
        ui.page(path, title="edge-fl", response_timeout=20)(_bound(page, context))


def _bound(page: Any, context: PageContext) -> Any:
    """A page function with just the parameters that the web framework fills in."""

    async def without_id(request: Request) -> None:
        await page(context, dict(request.query_params), "")

    async def with_id(request: Request, id: str = "") -> None:
        await page(context, dict(request.query_params), id)

    return with_id if page in (_device, _run) else without_id


@contextmanager
def _frame(context: PageContext, board: Board, here: str, title: str = "") -> Iterator[None]:
    """What surrounds every page: where one is, where one can go, and what went wrong."""
    ui.add_head_html(f"<style>{(FOLDER / 'style.css').read_text()}</style>")
    ui.add_head_html(f"<script>{(FOLDER / 'script.js').read_text()}</script>")
    ui.page_title(f"{title or PAGES[here]} · edge-fl")
    links = "".join(
        f'<a href="{path}"{" aria-current=page" if path == here else ""}>{name}</a>'
        for path, name in PAGES.items()
    )
    ui.html(
        f'<a class="skip" href="#main">To the content</a><header class="top"><a class="brand" href="/">edge-fl</a>'
        f'<nav aria-label="Pages">{links}</nav><span class="fleet">fleet {escape(context.fleet)}</span>'
        '<button class="plain" data-theme-button data-key="theme">◐</button></header>',
        sanitize=False,
    )
    with ui.element("main").props("id=main"):
        board.open()
        yield


async def _fleet(context: PageContext, address: dict[str, str], _: str) -> None:
    query = fleet_page.query_of(address)

    def go(wanted: Any) -> None:
        nonlocal query
        query = replace(fleet_page.query_of(wanted), search=query.search)

    def find() -> fleet.FleetPage:
        return fleet.page(context.db, context.fleet, query)

    board = Board(go)
    with _frame(context, board, "/"):
        ui.html('<div class="head"><h1>Fleet</h1></div>', sanitize=False)

        async def searched(event: Any) -> None:
            nonlocal query
            query = replace(query, search=str(event.args)[:80], page=0)
            await board.refresh()

        with ui.element("div").classes("bar"):
            search = ui.element("input").props(
                f'type=search placeholder="Search  /" aria-label="Search devices" value="{escape(query.search)}"'
            )
            search.on(
                "input",
                searched,
                js_handler="(e) => emit(e.target.value)",
                throttle=0.2,
                leading_events=False,
            )
            board.part(find, lambda page: fleet_page.filters(page, query))
        board.part(find, lambda page: fleet_page.table(page, query, datetime.now(UTC)))
        await board.start()


async def _device(context: PageContext, _: dict[str, str], id: str) -> None:
    board, find = Board(), partial(device.page, context.db, context.fleet, id)
    with _frame(context, board, "/", id):
        board.part(find, partial(device_page.title, device=id))
        board.part(find, lambda page: device_page.body(page, id, datetime.now(UTC)))
        await board.start()


async def _run(context: PageContext, _: dict[str, str], id: str) -> None:
    board = Board()
    confirm = Confirm()
    board.act = partial(_ask, context, board, confirm)
    find = partial(run.page, context.db, context.fleet, id)
    with _frame(context, board, "/run"):
        board.part(find, run_page.title)
        board.part(find, run_page.body)
        await board.start()


async def _releases(context: PageContext, _: dict[str, str], __: str) -> None:
    board = Board()
    confirm = Confirm()
    board.act = partial(_ask, context, board, confirm)

    def find() -> releases.ReleasesPage:
        return releases.page(context.db, context.fleet, context.kept())

    with _frame(context, board, "/releases"):
        ui.html('<div class="head"><h1>Releases</h1></div>', sanitize=False)
        for draw in (releases_page.current, releases_page.releases, releases_page.history):
            board.part(find, draw)
        await board.start()


async def _data(context: PageContext, address: dict[str, str], _: str) -> None:
    number = _whole(address)

    def go(wanted: Any) -> None:
        nonlocal number
        number = _whole(wanted)

    board = Board(go)
    with _frame(context, board, "/data"):
        ui.html('<div class="head"><h1>Data</h1></div>', sanitize=False)
        board.part(lambda: data.page(context.db, context.fleet, number), data_page.body)
        await board.start()


async def _log(context: PageContext, address: dict[str, str], _: str) -> None:
    level = address.get("level", "")

    def go(wanted: Any) -> None:
        nonlocal level
        level = str(wanted.get("level", ""))

    board = Board(go)
    with _frame(context, board, "/log"):
        ui.html('<div class="head"><h1>Log</h1></div>', sanitize=False)
        with ui.element("div").classes("bar"):
            board.part(lambda: level, log_page.filters)
        board.part(lambda: log.newest(context.db, context.fleet, level), log_page.body)
        await board.start()


def _ask(context: PageContext, board: Board, confirm: Confirm, wanted: str) -> None:
    """A button was pressed: ask, and then do it."""
    name, _, of = wanted.partition(":")
    action = ACTIONS.get(name)
    if action is None:
        return

    async def do() -> None:
        try:
            board.say(await asyncio.to_thread(action.do, context.db, context.fleet, of))
        except (EdgeFLError, ValueError) as error:
            board.say(str(error))
        await board.refresh()

    confirm.ask(action.title.format(of=of), action.text, action.word, do, danger=action.danger)


def _whole(address: Any) -> int:
    text = str(address.get("page", ""))
    return int(text) if text.isdecimal() and len(text) < 9 else 0
