"""A property of all pages: no mean stands without its number of devices, and no comparison is of different devices.

A registry is filled with random fleets, releases, reports and rounds. Each page is built without a browser; every accuracy on it must have
its n, and be one of those that follow from the reports by hand.
"""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from html.parser import HTMLParser
from statistics import fmean
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from nicegui import Client
from nicegui.page import page as page_of

from edge_fl import metrics
from edge_fl_console.dashboard.live import PageBoard, PageContext
from edge_fl_console.dashboard.pages import device, fleet
from edge_fl_console.dashboard.serve import ROUTES
from edge_fl_server.registry import Database, registered_devices, registered_reports, rollouts, runs
from edge_fl_server.registry.tables import DeviceRecord, ReleaseRecord, ReportRecord, RoundRecord, RunRecord
from tests.browsing import run_coroutine

PAGES = [path for path, (_, build) in ROUTES.items() if build not in (fleet.build, device.build)]
"""All but those whose rows and tiles are of single devices."""
ITEMS = {"p", "li", "td", "h1", "h2", "dl"}
"""Elements whose text is one statement; so is each child of <dl>."""
FIGURE = re.compile(r"[-+−]?\d+\.\d")
N = re.compile(r"\bn = (\d+)(?: to (\d+))?\b")
RELEASES = 3
NAMES = (metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST)
FINAL = (*NAMES, metrics.PERSONAL_AFTER, metrics.LOCAL_ONLY)
ROUND = 5

shares = st.integers(0, 1000).map(lambda n: n / 1000)


@dataclass(frozen=True)
class Reported:
    """One report of a head-only device."""

    release: int
    before: float | None
    after: float | None


reported = st.builds(Reported, st.integers(1, RELEASES), st.none() | shares, st.none() | shares)
Fleet = list[list[Reported]]
History = list[dict[str, tuple[float, int]]]
fleets = st.lists(st.lists(reported, max_size=4), max_size=6)
"""The reports of each device, the oldest first."""
histories = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.tuples(shares, st.integers(1, 9))), max_size=4
)
"""Metric -> mean and number of clients, of each round."""
Evaluated = list[dict[str, float]]
evaluations = st.lists(st.dictionaries(st.sampled_from(FINAL), shares), max_size=6)
"""Metric -> accuracy, of each full device in the newest evaluated round."""


def fill(db: Database, fleet: Fleet, history: History, evaluated: Evaluated) -> None:
    for number, values in enumerate(evaluated):
        own = {key: value for key, value in values.items() if key == metrics.PERSONAL_AFTER}
        others = {key: value for key, value in values.items() if key not in own}
        for kind, sent in (("evaluation", others), ("personal", own)):
            if sent:
                registered_reports.accept(
                    db, ReportRecord("main", f"full-{number}", kind, "toy", ROUND, kind, 9, sent)
                )
    runs.begin(db, RunRecord("toy", "main", "fedrep", "digits", "fleet", 9, ""))
    for round, found in enumerate(history, 1):
        means, clients = ({name: one[place] for name, one in found.items()} for place in (0, 1))
        runs.record_round(db, RoundRecord("toy", round, 9, 9, 1.0, metrics=means, clients=clients))
    for release in range(1, RELEASES + 1):
        rollouts.record_release(db, ReleaseRecord("main", release, "toy", release, "fedrep", "0" * 64, 100))
        record = rollouts.get(db, rollouts.begin(db, "main", release, previous=release - 1))
        assert record
        rollouts.advance(db, record, state="completed")
    for number, sent in enumerate(fleet):
        runs_release = sent[-1].release if sent else 0
        able = {"tier": "head"}
        registered_devices.record(
            db, [DeviceRecord("main", f"pi-{number}", "ready", release=runs_release, capability=able)]
        )
        for place, one in enumerate(sent):
            registered_reports.accept(
                db,
                ReportRecord(
                    "main", f"pi-{number}", f"r-{place}", "toy", 1, "head", 9, {}, one.before, one.after, one.release
                ),
            )  # fmt: skip


class Statements(HTMLParser):
    """The statements of markup: the text of each item without that of the items inside it."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[tuple[str, bool, list[str]]] = [("", True, [])]
        self.feed(markup)
        self.close()
        while self._open:
            self._end()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("i", "br", "input", "img"):
            self._open.append((tag, tag in ITEMS or self._open[-1][0] == "dl", []))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("i", "br"):
            self._end()

    def handle_data(self, data: str) -> None:
        next(text for _, is_item, text in reversed(self._open) if is_item).append(data)

    def _end(self) -> None:
        _, is_item, text = self._open.pop()
        if is_item and (statement := " ".join(" ".join(text).split())):
            self.found.append(statement)


def statements(db: Database, path: str, address: dict[str, str]) -> Iterator[str]:
    """Every statement of a page: of its markup, its table cells with their heading, and its curves with the label of each point."""

    async def built() -> list[dict[str, Any]]:
        client = Client(page_of(path))
        try:
            with client:
                board = PageBoard(PageContext(db, "main"))
                ROUTES[path][1](board, address)
                await board.refresh()
            return [dict(element.props) for element in client.elements.values() if element.visible]
        finally:
            client.delete()

    for props in run_coroutine(built()):
        yield from Statements(props.get("innerHTML", "")).found
        headings = {column["name"]: column["label"] for column in props.get("columns", ())}
        for row in props.get("rows", ()):
            yield from (
                f"{headings[name]}: {text}"
                for name, cell in row.items()
                if name in headings
                for text in Statements(cell).found
            )
        options = props.get("options", {})
        for line in options.get("series", ()) if isinstance(options, dict) else ():
            if line["type"] == "line" and line.get("name"):
                points = zip(options["xAxis"]["data"], line["data"], strict=True)
                yield from (f"{line['name']} at {x}: {y} %" for x, y in points if y is not None)


@dataclass(frozen=True)
class Fact:
    """A mean, the means before and after, or a mean difference with its interval, of n devices; in per cent."""

    n: int
    values: tuple[float, ...]

    def agrees(self, printed: tuple[float, ...], least: int, most: int) -> bool:
        close = [abs(a - b) < 0.0501 for a, b in zip(self.values, printed, strict=False)]
        return least <= self.n <= most and len(printed) == len(self.values) and all(close)


def add_comparison(facts: dict[str, list[Fact]], pairs: list[tuple[float, float]]) -> None:
    """Add the comparison and the difference of values before and after on the same devices, if there are any."""
    if pairs:
        gained = [100 * (after - before) for before, after in pairs]
        ends = metrics.interval(gained) if len(gained) > 1 else ()
        means = tuple(100 * fmean(column) for column in zip(*pairs, strict=True))
        facts["→"].append(Fact(len(pairs), means))
        facts["points"].append(Fact(len(pairs), (fmean(gained), *ends)))


def expected(fleet: Fleet, history: History, evaluated: Evaluated) -> dict[str, list[Fact]]:
    """The means, the comparisons ("→") and the differences ("points") that a page may show."""
    facts = {"": [Fact(n, (100 * mean,)) for found in history for mean, n in found.values()]}
    facts |= {"→": [], "points": []}
    for own in (metrics.PERSONAL_AFTER, metrics.PERSONAL_BEFORE):
        if measured := [one[own] for one in evaluated if own in one]:
            facts[""].append(Fact(len(measured), (100 * fmean(measured),)))
        for baseline in {*FINAL} - {own, metrics.PERSONAL_AFTER}:
            both = [(one[baseline], one[own]) for one in evaluated if own in one and baseline in one]
            add_comparison(facts, both)
    for release in range(1, RELEASES + 1):
        of_release = [found for sent in fleet if (found := [one for one in sent if one.release == release])]
        serving = [sent for sent in fleet if sent and sent[-1].release == release]
        after = [sent[-1].after for sent in serving if sent[-1].after is not None]
        first = [(found[0].before, found[0].after) for found in of_release]  # later ones: the same release
        both = [pair for pair in first if None not in pair]
        if after:
            facts[""].append(Fact(len(after), (100 * fmean(after),)))
        add_comparison(facts, both)
    return facts


@given(fleets, histories, evaluations)
def test_every_mean_has_its_n_and_every_comparison_is_of_the_same_devices(
    fleet: Fleet, history: History, evaluated: Evaluated
) -> None:
    facts = expected(fleet, history, evaluated)
    with closing(Database.open()) as db:
        fill(db, fleet, history, evaluated)
        for path in PAGES:
            for statement in statements(db, path, {"id": "toy"}):
                figures = tuple(map(float, FIGURE.findall(statement)))
                if not figures or ("%" not in statement and "points" not in statement):
                    continue
                n = N.search(statement)
                assert n, f"{path}: no n: {statement}"
                least, most = int(n[1]), int(n[2] or n[1])
                known = facts["points" if "points" in statement else "→" if "→" in statement else ""]
                assert any(one.agrees(figures, least, most) for one in known), f"{path}: {statement}"
