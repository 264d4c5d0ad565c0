"""Parts of an open page that are drawn from a value, and drawn again when that value has changed.

A part finds its value in a thread, so that a slow database holds nobody up; only what looks different is sent to the browser. When the
registry does not answer, the page keeps what it showed and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from nicegui import ui

from edge_fl.errors import EdgeFLError
from server.report.formatting import escape

EVERY_S = 1.5
GO = """(event) => {
  const at = event.target.closest('[data-go], [data-act]');
  if (!at || at.disabled) return;
  event.preventDefault();
  if (at.dataset.act) return emit({act: at.dataset.act});
  history.replaceState(null, '', at.dataset.go ? '?' + at.dataset.go : location.pathname);
  emit({go: at.dataset.go});
}"""

Go = Callable[[Mapping[str, str]], None]
Act = Callable[[str], None]


@dataclass
class Part:
    """One piece of a page."""

    find: Callable[[], Any]
    draw: Callable[[Any], str]
    element: ui.html

    def show(self, value: Any) -> None:
        """Draws where that makes a difference."""
        drawn = self.draw(value)
        if drawn != self.element.content:
            self.element.content = drawn


@dataclass
class Board:
    """The parts of one open page. `go` hears where a person wants to look (as fields of the address), `act` what is to be done."""

    go: Go = lambda wanted: None
    act: Act = lambda wanted: None
    parts: list[Part] = field(default_factory=list)
    alarm: ui.html | None = None
    news: ui.html | None = None

    def open(self) -> None:
        """Places for what went wrong and for what was done, above everything else."""
        self.alarm = ui.html("", sanitize=False).props('role="alert"')
        self.news = ui.html("", sanitize=False).props('role="status"')

    def part(self, find: Callable[[], Any], draw: Callable[[Any], str], kind: str = "") -> None:
        """A piece of the page, in the place where it is made; clicks on what has `data-go` or `data-act` are heard."""
        element = ui.html("", sanitize=False).classes(kind)
        element.on("click", self._clicked, js_handler=GO)
        self.parts.append(Part(find, draw, element))

    async def refresh(self) -> None:
        """Brings every part up to date; what several parts are drawn from is looked up once."""
        try:
            found = {
                find: await asyncio.to_thread(find) for find in dict.fromkeys(p.find for p in self.parts)
            }
            for part in self.parts:
                part.show(found[part.find])
            said = ""
        except EdgeFLError as error:
            said = f'<p class="alarm">{escape(error)}. Looked at again in {EVERY_S:g} s.</p>'
        if self.alarm and self.alarm.content != said:
            self.alarm.content = said

    def say(self, text: str) -> None:
        """What was done on behalf of whoever looks."""
        if self.news:
            self.news.content = f'<p class="news">{escape(text)}</p>' if text else ""

    async def start(self) -> None:
        """Draws the page for the first time and keeps it up to date from then on."""
        await self.refresh()
        ui.timer(EVERY_S, self.refresh, immediate=False)

    async def _clicked(self, event: Any) -> None:
        wanted = event.args if isinstance(event.args, dict) else {}
        if "act" in wanted:
            self.act(str(wanted["act"]))
        else:
            self.go(dict(parse_qsl(str(wanted.get("go", "")))))
            await self.refresh()


class Confirm:
    """One question before something is done; the keyboard stays inside until it is answered, Escape says no."""

    def __init__(self) -> None:
        self._do: Callable[[], Awaitable[None]] | None = None
        with ui.element("dialog").props('aria-labelledby="question"') as self._dialog:
            self._title = ui.html("", sanitize=False, tag="h2").props('id="question"')
            self._text = ui.html("", sanitize=False, tag="p").classes("quiet")
            with ui.element("div").classes("choice"):
                self._no = ui.element("button").props('type="button" autofocus')
                self._no.on("click", self._close)
                with self._no:
                    ui.html("Cancel", sanitize=False, tag="span")
                self._yes = ui.element("button").props('type="button" id="confirm"')
                self._yes.on("click", self._confirmed)
                with self._yes:
                    self._word = ui.html("", sanitize=False, tag="span")

    def ask(
        self, title: str, text: str, word: str, do: Callable[[], Awaitable[None]], *, danger: bool
    ) -> None:
        """Opens the dialogue; `do` runs when it is confirmed."""
        self._do = do
        self._title.content, self._text.content, self._word.content = map(escape, (title, text, word))
        self._yes.classes(replace="danger" if danger else "primary")
        ui.run_javascript(f"document.getElementById('{self._dialog.html_id}').showModal()")

    def _close(self) -> None:
        self._do = None
        ui.run_javascript(f"document.getElementById('{self._dialog.html_id}').close()")

    async def _confirmed(self) -> None:
        do = self._do
        self._close()
        if do:
            await do()
