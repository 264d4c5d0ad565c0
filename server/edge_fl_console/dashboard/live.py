"""Live parts of an open page: each is drawn from a value of the registry and updated when that value changes.

Values are read in a thread, so that a slow database blocks no other page. While the registry does not respond, the page keeps its contents
and shows the error.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from nicegui import ui

from edge_fl.console.units import escape
from edge_fl.errors import EdgeFLError
from edge_fl.wire.roles import NotPermittedError
from edge_fl_console.dashboard.actions import ACTIONS, Question, recorded_as, require
from edge_fl_console.dashboard.charts import Chart
from edge_fl_console.dashboard.context import PageContext
from edge_fl_console.dashboard.parts import PageColumn, cells
from edge_fl_server.registry import audit

EVERY_S = 1.5
NOTICE_MS, ERROR_MS = 5_000, 20_000
SIGNED_OUT = "the sign-in has expired or was revoked: reload the page to sign in"
PLAIN: dict[str, Any] = {"color": "plain", "textColor": "plain"}  # the style sheet has the colours
PRESSED = "(event) => { const at = event.target.closest('[data-act]'); if (at) emit(at.dataset.act); }"
OPEN_DEVICE = (
    "(event) => { const device = event.componentType === 'yAxis' ? event.value : event.data?.device;"
    " if (device) window.location.assign('/device/' + encodeURIComponent(device)); }"
)
"""Opens the page of a device in whose row of a chart a label or point is clicked; also before the page is connected, as a link does."""
CELL = """
<q-td :props="props" :data-label="props.col.label" :class="{bare: ['', '–'].includes(props.value)}">
  <span v-html="props.value"></span>
</q-td>
"""  # a phone shows the label of each cell, and none without a value
HEADING = """
<q-th :props="props" scope="col" :aria-sort="!props.col.__thClass.includes(' sorted') ? null :
  props.col.__thClass.includes('sort-desc') ? 'descending' : 'ascending'">
  <button v-if="props.col.sortable" :data-key="'sort-' + props.col.name">{{ props.col.label }}</button>
  <template v-else>{{ props.col.label }}</template>
</q-th>
"""  # Quasar's own headings cannot be reached with the keyboard
PAGER = """
<div class="pager">
  <span>{{ ((props.pagination.page - 1) * props.pagination.rowsPerPage + 1).toLocaleString("en") }}–{{
    Math.min(props.pagination.page * props.pagination.rowsPerPage, props.pagination.rowsNumber).toLocaleString("en")
  }} of {{ props.pagination.rowsNumber.toLocaleString("en") }} devices</span>
  <span class="to">
    <button data-key="previous" :disabled="props.isFirstPage" @click="props.prevPage">‹ Previous</button>
    <button data-key="next" :disabled="props.isLastPage" @click="props.nextPage">Next ›</button>
  </span>
</div>
"""

Find = Callable[[], Any]
Address = Mapping[str, str]


class PageBoard:
    """The parts of one open page, in the order in which they are added."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self._parts: list[tuple[Find, Callable[[Any], object]]] = []
        self._alarm: ui.html | None = None

    def alarm(self) -> None:
        """Place the message that the registry does not respond."""
        self._alarm = ui.html("", sanitize=False).props('role="alert"')

    def part(self, find: Find, show: Callable[[Any], object]) -> None:
        """Call `show` with the value of `find` at every refresh."""
        self._parts.append((find, show))

    def html(self, find: Find, draw: Callable[[Any], str], absent: str = "") -> ui.html:
        """Markup drawn from a value, `absent` for None; a button with `data-act` starts that action."""
        element = ui.html("", sanitize=False).on("click", self._pressed, js_handler=PRESSED)
        self.part(find, lambda value: element.set_content(absent if value is None else draw(value)))
        return element

    @contextmanager
    def filters(self, chosen: Callable[[], int]) -> Iterator[None]:
        """The filters of a list, of which `chosen` are in use; on a phone behind a button that says so."""
        button = ui.element("button").props("type=button data-fold aria-expanded=false")
        with button:
            label = ui.html("Filters", sanitize=False, tag="span")
        with ui.element("div").classes("filters"):
            yield
        self.part(
            chosen, lambda count: label.set_content(f"Filters ({count} chosen)" if count else "Filters")
        )

    def table(
        self,
        find: Find,
        columns: Sequence[PageColumn],
        rows: Callable[[Any], Iterable[Any]],
        title: str = "",
        *,
        per_page: int = 0,
    ) -> ui.table:
        """A table with a row for each of the value's `rows`; hidden without any.

        With `per_page` the database sorts and pages: the caller handles the "request" event.
        """
        with ui.element("section") as section:
            if title:
                ui.html(f"<h2>{title}</h2>", sanitize=False)
            pagination = {"rowsPerPage": per_page, "rowsNumber": 0} if per_page else None
            table = ui.table(rows=[], columns=[column.options for column in columns], pagination=pagination)
        section.set_visibility(False)
        table.props("flat binary-state-sort").classes("sheet").on("click", self._pressed, js_handler=PRESSED)
        table.add_slot("body-cell", CELL)
        table.add_slot("header-cell", HEADING)
        if per_page:
            table.add_slot("bottom", PAGER)
        else:
            table.props("hide-bottom")

        def show(value: Any) -> None:
            shown = [] if value is None else cells(columns, rows(value))
            update(table, "rows", shown)
            section.set_visibility(bool(shown))

        self.part(find, show)
        return table

    def chart(self, find: Find, draw: Callable[[Any], Chart | None], title: str) -> None:
        """A chart; absent while there is none to draw. A click on a device opens its page."""
        with ui.element("section") as section:
            ui.html(f"<h2>{title}</h2>", sanitize=False)
            with ui.element("div").classes("sheet padded") as sheet:
                legend = ui.html("", sanitize=False)
        section.set_visibility(False)
        elements: list[ui.echart] = []

        def show(value: Any) -> None:
            chart = None if value is None else draw(value)
            section.set_visibility(chart is not None)
            if chart is None:
                return
            if not elements:  # only now, as ECharts needs a visible element
                with sheet:
                    elements.append(ui.echart(chart.options, renderer="svg"))
                    elements[0].on("componentClick", js_handler=OPEN_DEVICE)
            legend.set_content(chart.legend)
            update(elements[0], "options", chart.options)
            elements[0].style(f"height: {chart.height}px; {chart.width}")

        self.part(find, show)

    async def refresh(self) -> None:
        """Update every part; a value that several parts share is read once."""
        try:
            await asyncio.to_thread(self._require_signed_in)
            finds = dict.fromkeys(find for find, _ in self._parts)
            values = {find: await asyncio.to_thread(find) for find in finds}
            for find, show in self._parts:
                show(values[find])
            self._warn("")
        except EdgeFLError as error:
            self._warn(f'<p class="alarm">{escape(error)}. Next attempt in {EVERY_S:g} s.</p>')

    def _warn(self, markup: str) -> None:
        if self._alarm:
            self._alarm.set_content(markup)

    async def start(self) -> None:
        """Draw the page for the first time and refresh it periodically from then on."""
        await self.refresh()
        ui.timer(EVERY_S, self.refresh, immediate=False)

    async def _pressed(self, event: Any) -> None:
        name, _, target = str(event.args).partition(":")
        if name not in ACTIONS:
            return
        client = ui.context.client
        try:
            question = await asyncio.to_thread(self._ask, name, target)
            if not await _confirmed(question):
                return
            message, shown_ms = await asyncio.to_thread(self._act, name, target), NOTICE_MS
        except EdgeFLError as error:
            message, shown_ms = str(error), ERROR_MS
        if client.is_deleted:  # its tab was closed meanwhile
            return
        ui.notify(message, position="top", timeout=shown_ms, close_button="Close", **PLAIN)
        await self.refresh()

    def _require_signed_in(self) -> None:
        """Raise NotPermittedError if the person is not signed in any more."""
        if not self.context.access.holds():
            raise NotPermittedError(SIGNED_OUT)

    def _ask(self, name: str, target: str) -> Question:
        """The question before an action, if the person may do it."""
        self._require_signed_in()
        require(self.context, name, target)
        return ACTIONS[name].ask(self.context, target)

    def _act(self, name: str, target: str) -> str:
        """Do an action that was confirmed; the audit log has it."""
        context = self.context
        self._require_signed_in()
        recorded = recorded_as(context, name, target)
        with audit.acting(context.db, context.fleet, context.access.person, recorded, target):
            return ACTIONS[name].do(context, target)


def update(element: Any, name: str, value: Any) -> None:
    """Set a property of an element; a value that is equal to the present one is not sent to the browser."""
    if element.props.get(name) != value:
        element.props[name] = value


async def _confirmed(question: Question) -> bool:
    with ui.dialog() as dialog, ui.card():
        ui.html(escape(question.title), sanitize=False, tag="h2")
        ui.html(escape(question.text), sanitize=False, tag="p")
        if question.command:
            ui.html(f"<code>{escape(question.command)}</code>", sanitize=False, tag="pre")
        confirm = [(question.word, "id=confirm", True)] if question.word else []
        with ui.element("div").classes("choice"):
            for word, kind, answer in (("Cancel" if confirm else "Close", "autofocus", False), *confirm):
                look = ("danger" if question.danger else "primary") if answer else ""
                button = ui.element("button").props(f"type=button {kind}").classes(look)
                with button.on("click", partial(dialog.submit, answer)):
                    ui.html(escape(word), sanitize=False, tag="span")
    answer = bool(await dialog)
    if not dialog.is_deleted:  # with its tab
        dialog.delete()
    return answer
