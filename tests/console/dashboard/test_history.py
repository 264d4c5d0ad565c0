"""The history of a fleet: what is entered, how old rows are thinned out, and the charts of Overview."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_fl_console import history as recorded
from edge_fl_console.alerts import watcher
from edge_fl_console.dashboard.pages import overview, releases
from edge_fl_console.history import HistoryRecorder
from edge_fl_server.registry import Database, fleets, history
from edge_fl_server.registry.history import DAY_S, HOUR_S
from edge_fl_server.registry.tables import HistoryRecord
from tests.browsing import LOOKS, dashboard, visiting
from tests.console.dashboard import filled

DEVICES = 40
PICTURES = os.environ.get("EDGE_FL_SCREENSHOTS", "")
OUTSIDE = """() => [...document.querySelectorAll("#main svg")].flatMap((svg) => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const clipped = texts.filter(([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1);
  const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  const pairs = texts.flatMap(([name, box], n) =>
    texts.slice(n + 1).filter(([, other]) => over(box, other)).map(([two]) => `${name} / ${two}`));
  return [...clipped.map(([name]) => `${name} is cut off`), ...pairs];
})"""
"""Labels of charts that are cut off, or that overlap."""


@pytest.fixture
def db(database_url: str, tmp_path: Path) -> Iterator[Database]:
    db = Database.open(database_url)
    filled.fill(db, DEVICES, tmp_path)
    yield db
    db.close()


def test_a_row_has_the_figures_of_the_pages(db: Database) -> None:
    HistoryRecorder(db, "main").look(1_000_007)
    (row,) = history.since(db, "main", 0)
    page = releases.read(db, "main")
    of_release = page.releases[3].reports
    assert (row.at_s, row.devices, row.release) == (1_000_000, DEVICES, 3)
    by_status = overview.read(db, "main").by_status
    assert row.online == by_status["ready"] + by_status["alert"]
    assert (row.served, row.served_n) == (pytest.approx(of_release.after), of_release.measured)
    assert row.served_n <= page.releases[3].running and row.full is None
    filled.evaluate(db, DEVICES)


def test_a_row_is_entered_once_in_ten_seconds(db: Database) -> None:
    recorder = HistoryRecorder(db, "main")
    for now_s in (100, 101, 109, 110, 125):
        recorder.look(now_s)
    HistoryRecorder(db, "main").look(111)  # another server of the fleet
    assert [row.at_s for row in history.since(db, "main", 0)] == [100, 110, 120]


def test_old_rows_are_thinned_out_and_deleted(db: Database) -> None:
    now_s, rows = 800 * DAY_S, []
    for age_s in (*range(0, 2 * HOUR_S, 10), *range(2 * HOUR_S, 20 * DAY_S, 300), 364 * DAY_S, 366 * DAY_S):
        rows.append({"fleet": "main", "at_s": now_s - age_s, "devices": 1, "online": 1, "release": 0})
    none = dict.fromkeys(("served", "fleets_head", "full"))
    none |= dict.fromkeys(("served_n", "fleets_head_n", "full_n"), 0)
    db.put(history.history, [row | none for row in rows])
    history.record(db, HistoryRecord("other", now_s - 790 * DAY_S, 1, 1))
    for _ in range(2):  # the second time there is nothing left to do
        history.thin(db, "main", now_s)
        ages = [now_s - row.at_s for row in history.since(db, "main", 0)]
        assert len([age for age in ages if age <= HOUR_S]) == 361
        assert len([age for age in ages if HOUR_S < age <= DAY_S]) == pytest.approx(23 * 6, abs=2)
        assert len([age for age in ages if 7 * DAY_S < age <= 20 * DAY_S]) == pytest.approx(13 * 4, abs=2)
        assert max(ages) == 364 * DAY_S
    assert len(history.since(db, "other", 0)) == 1


def test_the_charts_have_axes_with_units_n_and_gaps_without_a_server(tmp_path: Path) -> None:
    db = Database.open(tmp_path / "registry.sqlite")
    filled.past(db, DEVICES)
    rows = history.since(db, "main", 0)
    accuracy, online = overview.accuracy_chart(rows), overview.online_chart(rows)
    assert accuracy is not None and online is not None
    assert (
        accuracy.options["yAxis"]["name"] == "mean accuracy, %" and accuracy.options["xAxis"]["name"] == "UTC"
    )
    served, of_fleets, full = accuracy.options["series"]
    assert served["name"] == f"heads in service, n = {rows[-1].served_n}"
    assert [one["name"] for one in (served, of_fleets, full)] == accuracy.options["legend"]["data"]
    last = rows[-1]
    assert served["data"][-1] == [
        1000 * last.at_s,
        round(100 * (last.served or 0), 1),
        f"heads in service: {100 * (last.served or 0):.1f} % (n = {last.served_n}, release 3)",
    ]
    assert sum(value is None for _, value, _ in served["data"]) == 1  # the hour without a server
    assert online.options["yAxis"]["name"] == "number of devices" and online.options["yAxis"]["min"] == 0
    assert overview.accuracy_chart([]) is None and overview.online_chart([]) is None


def test_a_server_that_runs_records_the_history(tmp_path: Path) -> None:
    registry = tmp_path / "registry.sqlite"
    db = Database.open(registry)
    filled.fill(db, DEVICES, tmp_path)
    fleets.begin(db, "main", 1)
    with watcher.watching(str(registry), "main", tmp_path, poll_s=0.05):
        until_s = time.monotonic() + 60
        while not (rows := history.since(db, "main", 0)) and time.monotonic() < until_s:
            time.sleep(0.05)
    assert rows[0].devices == DEVICES == recorded.of_now(db, "main", 0).devices


@pytest.mark.browser
def test_overview_shows_accuracy_and_devices_online_over_time(browser: Any, tmp_path: Path) -> None:
    registry = tmp_path / "registry.sqlite"
    db = Database.open(registry)
    filled.fill(db, DEVICES, tmp_path)
    filled.past(db, DEVICES)
    db.close()
    with dashboard(registry) as running, visiting(browser, running.address) as visit:
        visit.go("/", "svg text:text-is('mean accuracy, %')")
        for width, scheme in LOOKS:
            visit.look(width, scheme)
            assert visit.flaws() == []
            for name in ("number of devices", "devices of the fleet", "UTC"):
                assert visit.page.locator(f"svg text:text-is('{name}')").count() >= 1
            outside = visit.page.evaluate(OUTSIDE)
            assert not outside, (width, scheme, outside)
            if PICTURES:
                picture = Path(PICTURES) / f"overview-past-{width}-{scheme}.png"
                visit.page.screenshot(path=picture, full_page=True)
        visit.page.click("text=last hour")
        visit.page.wait_for_url("**/?period=hour")
