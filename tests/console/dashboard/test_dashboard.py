"""The dashboard without a browser: queries, pages, actions, access, metrics."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx
import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from edge_fl import metrics
from edge_fl.cli import main
from edge_fl.console import units
from edge_fl.errors import ConfigError, InputError
from edge_fl.fields import MAX_SAMPLES
from edge_fl.metrics import Summary
from edge_fl.wire.host_names import is_loopback
from edge_fl.wire.messages import Capability
from edge_fl_console import failure_texts
from edge_fl_console.dashboard import actions, charts, parts, prometheus, standing
from edge_fl_console.dashboard.auth import LoginMiddleware
from edge_fl_console.dashboard.context import PageContext
from edge_fl_console.dashboard.pages import data, device, fleet, log, releases, run
from edge_fl_console.dashboard.pages.fleet import FleetQuery
from edge_fl_console.dashboard.pages.log import LogQuery
from edge_fl_console.dashboard.parts import PageColumn
from edge_fl_console.dashboard.serve import MENU, DashboardSettings
from edge_fl_server import selectors
from edge_fl_server.registry import Database, registered_devices, registered_reports, rollouts, runs, tables
from edge_fl_server.registry.rollouts import NO_RUN
from edge_fl_server.registry.tables import (
    DeviceRecord,
    RejectionRecord,
    ReleaseRecord,
    ReportRecord,
    RunEnd,
    RunRecord,
)
from edge_fl_server.release.repository import Repository
from tests.browsing import run_coroutine
from tests.console.dashboard import filled
from tests.devices import graphs

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
TOKEN = "a-token-of-some-length"


@pytest.fixture
def db(tmp_path: Path) -> Database:
    db = Database.open()
    filled.fill(db, 120, tmp_path)
    return db


def test_a_page_of_the_fleet_is_sorted_and_cut_by_the_database(db: Database) -> None:
    first = fleet.read(db, "main", FleetQuery(sort="device"), per_page=50)
    assert [row.device for row in first.rows] == [filled.name(n) for n in range(50)]
    assert (first.matches, first.total, first.pages) == (120, 120, 3)
    last = fleet.read(db, "main", FleetQuery(sort="device", page=99), per_page=50)
    assert (last.page, len(last.rows)) == (2, 20)


def cells(columns: Sequence[PageColumn], rows: Iterable[Any]) -> str:
    """The markup of all cells of a table."""
    return " ".join(str(cell) for row in parts.cells(columns, rows) for cell in row.values())


@pytest.mark.parametrize("sort", [column.name for column in fleet.COLUMNS if column.sortable])
def test_every_column_sorts_both_ways(db: Database, sort: str) -> None:
    _report_today(db)
    for down in (False, True):
        found = [
            getattr(row, sort)
            for row in fleet.read(db, "main", FleetQuery(sort=sort, down=down), per_page=200).rows
        ]
        known = [value for value in found if value is not None]
        order = selectors.version if sort == "agent" else None
        in_order = sorted(known, key=order, reverse=down)  # type: ignore[arg-type]
        assert known == in_order == found[: len(known)]  # those without a value come last
    assert len({*found}) > 1


def _report_today(db: Database) -> None:
    """Devices with reports of today, whose values grow with the device's number, and one device with drift."""
    able = to_builtins(Capability("head", "test", "3", samples=3, drift=1.2))
    registered_devices.record(db, [DeviceRecord("main", "pi-y", "ready", capability=able)])
    for number in range(1, 12):
        kind, run = ("update", "toy-0") if number % 2 else ("head", "toy-1")
        measured = {metrics.EPSILON: number / 4} if kind == "update" else {metrics.FLEET: number / 20}
        sent = ReportRecord(
            "main",
            filled.name(number),
            f"today-{number}",
            run,
            9,
            kind,
            5,
            measured,
            after=0.5,
        )
        registered_reports.accept(db, sent)


def test_the_epsilon_column_appears_only_in_fleets_that_send_noisy_updates(db: Database) -> None:
    assert "epsilon" not in fleet.visible(fleet.read(db, "main", FleetQuery()))
    _report_today(db)
    found = fleet.read(db, "main", FleetQuery(sort="device"))
    assert [row.epsilon for row in found.rows[:6]] == [None, 0.25, None, 0.75, None, 1.25]
    assert "epsilon" in fleet.visible(found) and " 1.25" in cells(fleet.COLUMNS, found.rows)


def test_the_fleet_and_a_device_show_agents_and_tags_and_select_by_version(db: Database) -> None:
    found = fleet.read(db, "main", FleetQuery(where="agent<0.2.0", sort="device"))
    assert {row.agent for row in found.rows} == {"0.1.0"} and found.matches == 40  # not 0.10.0
    rows = fleet.read(db, "main", FleetQuery(sort="agent", down=True)).rows
    assert [row.agent for row in rows[:41]] == ["0.10.0"] * 40 + ["0.2.0"]
    shown = cells(fleet.COLUMNS, found.rows[:1])
    assert "0.1.0" in shown and 'href="/fleet?where=site%3Dberlin"' in shown
    page = device.read(db, "main", filled.name(0))
    assert page is not None and page.tags == {"site": "berlin", "line": "2"}
    assert "site=berlin" in device.title(page) and "0.1.0" in device.summary(page)
    wrong = fleet.read(db, "main", FleetQuery(where="agent<new"))
    assert "expected a version, such as 0.2.0" in fleet.note(wrong)


def test_every_command_on_a_device_exists_and_is_quoted_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "the fleet's runs" / "releases"
    registry = home.parent / "server" / "registry.sqlite"
    registry.parent.mkdir(parents=True)
    (home.parent / "identities" / "operator").mkdir(parents=True)
    (home.parent / "identities" / "ca.key").touch()
    with closing(Database.open(registry)) as db:
        registered_devices.record(db, [DeviceRecord("plant-2", "pi-07", "ready")])
        context = PageContext(db, "plant-2", home, str(registry))
        found = device.commands(context, "pi-07")
    assert [shlex.split(line)[:3] for line in found.values()] == [
        ["edge-fl", *words.split()[:2]] for words in device.COMMANDS.values()
    ]
    outcomes = []
    for line in found.values():
        words = shlex.split(line)
        assert words[words.index("--home") + 1] == str(home) and "pi-07" in words
        assert words[words.index("--fleet") + 1] == "plant-2" and "--database" not in words
        outcomes.append((main(words[1:]), capsys.readouterr().err))
    said = ("/identities/operator/client.key", "", "key 'KEY'", "device 'NEW'", "expected --yes")
    for (code, error), expected in zip(outcomes, (said[0], *said), strict=True):
        assert (code, expected in error) == (4 if expected else 0, True), error


def test_search_and_filters_narrow_the_fleet(db: Database) -> None:
    assert fleet.read(db, "main", FleetQuery(search="0011")).matches == 11
    assert fleet.read(db, "main", FleetQuery(search="%")).matches == 0
    lost = fleet.read(db, "main", FleetQuery(status="lost"))
    assert {row.status for row in lost.rows} == {"lost"} and lost.by_status["ready"] == 83
    assert {row.tier for row in fleet.read(db, "main", FleetQuery(tier="full")).rows} == {"full"}


def test_a_selector_narrows_the_fleet_and_a_wrong_one_is_named(db: Database) -> None:
    found = fleet.read(db, "main", FleetQuery(where="tier=full and not status=lost"))
    assert {(row.tier, row.status) for row in found.rows} == {("full", "ready")} and not found.wrong
    wrong = fleet.read(db, "main", FleetQuery(where="tier=full and"))
    assert wrong.matches == 0 and "position 14: ends" in fleet.note(wrong)


def test_a_row_shows_the_newest_report(db: Database) -> None:
    row = fleet.read(db, "main", FleetQuery(search="pi-00004")).rows[0]
    report = device.read(db, "main", "pi-00004")
    assert report is not None
    assert (row.before, row.after) == (report.reports[0].before, report.reports[0].after)
    assert report.reports[0].release == 3


def _reported(db: Database, id: str, labels: int, **found: float) -> None:
    """A head-only device with a report on a head that is adapted from the fleet's."""
    able = to_builtins(Capability("head", "test", "3", samples=labels, head="logistic"))
    registered_devices.record(db, [DeviceRecord("main", id, "ready", release=3, capability=able)])
    sent = ReportRecord(
        "main",
        id,
        f"r-{id}-{labels}",
        "",
        0,
        "head",
        labels,
        {metrics.TEST_SAMPLES: float(labels), **found},
        after=found.get(metrics.PERSONAL_AFTER),
        release=3,
        head="fleet",
    )
    registered_reports.accept(db, sent)


def test_a_device_without_labels_shows_the_fleets_head_and_no_accuracy(db: Database) -> None:
    _reported(db, "pi-new", 0)
    (row,) = (found := fleet.read(db, "main", FleetQuery(search="pi-new"))).rows
    shown = cells(fleet.COLUMNS, found.rows)
    assert (
        "not measured yet" in shown and "fleet&#x27;s head, not personal yet" in shown and row.after is None
    )
    page = device.read(db, "main", "pi-new")
    assert page is not None
    summary = device.summary(page)
    assert "not measured yet" in summary and "not personal yet" in summary and "90 % interval" not in summary


def test_a_device_with_one_picture_per_class_says_why_it_has_no_accuracy(db: Database) -> None:
    """It measures on no scene: a class counts from its second one on."""
    _reported(db, "pi-new", 10, **{metrics.TEST_SAMPLES: 0.0})
    why = "not measured yet (0 of 8 scenes: a class counts from its second scene on)"
    found = fleet.read(db, "main", FleetQuery(search="pi-new"))
    assert why in cells(fleet.COLUMNS, found.rows)
    page = device.read(db, "main", "pi-new")
    assert page is not None and why in device.summary(page)


@pytest.mark.parametrize("status", ["ready", "lost", "disconnected", "unknown", "alert"])
def test_a_revoked_device_is_never_said_to_come_back(db: Database, status: str) -> None:
    registered_devices.record(db, [DeviceRecord("main", "pi-new", status, why="error" * (status == "alert"))])
    registered_devices.set_revoked(db, "main", {"pi-new"})
    (row,) = fleet.read(db, "main", FleetQuery(search="pi-new")).rows
    assert fleet.message(row) == (
        "its certificate was revoked, so it cannot connect; to admit it again:"
        " edge-fl fleet enrol pi-new, and the new claim on the device"
    )
    page = device.read(db, "main", "pi-new")
    assert page is not None
    said = device.title(page) + fleet._status(row)
    assert "by itself" not in said and ">lost<" not in said and "edge-fl fleet enrol pi-new" in said
    assert standing.by_status(db, "main")["revoked"] >= 1


def test_a_lost_device_says_what_happens_now(db: Database) -> None:
    registered_devices.record(db, [DeviceRecord("main", "pi-new", "lost")])
    page = device.read(db, "main", "pi-new")
    assert page is not None
    assert failure_texts.LOST in device.title(page)


def test_a_release_that_no_run_trained_names_and_links_none(db: Database) -> None:
    """The name of no run is "none": a link to it led to an unknown run."""
    for number, name in ((8, NO_RUN), (9, "gone-1")):
        rollouts.record_release(
            db, ReleaseRecord("main", number, name, 0 if name == NO_RUN else 4, "m", "x", 9)
        )
    rows = {row.record.release: row for row in releases.read(db, "main").releases.values()}
    assert releases._origin(rows[8]) == '<span class="quiet">no run</span>'
    assert releases._origin(rows[9]) == "gone-1, round 4", "its run is not in this registry"
    assert "/run/" in releases._origin(rows[3])
    texts = [log.text(event) for event in log.newest(db, "main") if event.kind == "release"]
    assert "published; no run trained it" in texts and "published, from round 4 of gone-1" in texts
    _reported(db, "pi-new", 9)
    sent = ReportRecord("main", "pi-new", "r", NO_RUN, 0, "head", 9, {})
    assert [column.draw(sent) for column in device.REPORTS if column.label in ("Run", "Round")] == [
        units.NOTHING
    ] * 2


def test_an_accuracy_is_shown_with_its_labels_interval_and_the_fleets_head(db: Database) -> None:
    _reported(
        db, "pi-new", 60, **{metrics.PERSONAL_AFTER: 0.83, metrics.FLEET: 0.76, metrics.OWN_WEIGHT: 0.2}
    )
    found = fleet.read(db, "main", FleetQuery(search="pi-new"))
    shown = cells(fleet.COLUMNS, found.rows)
    assert "83.0 % of 60 scenes" in shown and "90 % interval 74 to 90 %" in shown and "76.0" in shown
    assert "fleet&#x27;s head with own labels" in shown
    page = device.read(db, "main", "pi-new")
    assert page is not None
    summary = device.summary(page)
    assert all(
        text in summary for text in ("83.0", "74 to 90 %", "76.0", "fleet&#x27;s head with own labels")
    )


def test_an_older_heads_accuracy_is_not_that_of_one_without_enough_labels(db: Database) -> None:
    """A new release changed the classes: of the few labels that are left there is no accuracy."""
    _reported(db, "pi-new", 60, **{metrics.PERSONAL_AFTER: 0.83})
    _reported(db, "pi-new", 5, **{metrics.OWN_WEIGHT: 0.9})
    found = fleet.read(db, "main", FleetQuery(search="pi-new"))
    shown = cells(fleet.COLUMNS, found.rows)
    assert "not measured yet" in shown and "83.0" not in shown
    assert "own head (the fleet&#x27;s contradicts these labels)" in shown
    page = device.read(db, "main", "pi-new")
    assert page is not None and "not measured yet (5 of 8 scenes)" in device.summary(page)


def test_head_only_devices_of_a_run_show_the_fleets_head_too(db: Database) -> None:
    page = run.read(db, "main")
    assert page is not None
    mine, fleets = Summary(0.9, 0.9, 0.01, 0.8, 12), Summary(0.8, 0.8, 0.01, 0.7, 12)
    shown = run.summary(replace(page, heads={metrics.PERSONAL_AFTER: mine, metrics.FLEET: fleets}))
    assert "fleet's head 80.0 (n = 12)" in shown


def test_a_row_shows_the_drift_of_its_device(db: Database) -> None:
    capability = Capability("head", "test", "3", drift=1.24)
    registered_devices.record(
        db, [DeviceRecord("main", "pi-x", "ready", why="drift", capability=to_builtins(capability))]
    )
    found = fleet.read(db, "main", FleetQuery(search="pi-x"))
    assert found.rows[0].drift == 1.24 and "1.2 σ" in cells(fleet.COLUMNS, found.rows)
    assert not any(row.drift for row in fleet.read(db, "main", FleetQuery(search="pi-0")).rows)


def test_blocked_devices_and_outliers_are_shown_with_reason_and_remedy(db: Database) -> None:
    seven, six = filled.name(7), filled.name(6)
    (row,) = fleet.read(db, "main", FleetQuery(search="quarantined")).rows
    assert (row.device, row.standing, row.outlier_score) == (seven, "quarantined", 22.8)
    assert '<span class="text-bad">22.8</span>' in cells(fleet.COLUMNS, [row])
    assert [row.device for row in fleet.read(db, "main", FleetQuery(search="revoked")).rows] == [six]
    shown = {name: device.read(db, "main", name) for name in (seven, six)}
    texts = {name: device.title(page) + device.summary(page) for name, page in shown.items() if page}
    assert (
        "the last one because its update is much larger than allowed; to count its reports again: edge-fl fleet admit pi-00007"
        in texts[seven]
    )
    assert "22.8" in texts[seven] and "edge-fl fleet enrol pi-00006" in texts[six]


def test_a_failure_word_is_explained_with_its_remedy(db: Database) -> None:
    registered_devices.record(db, [DeviceRecord("main", "pi-x", "alert", why="no_data")])
    shown = device.read(db, "main", "pi-x")
    assert shown and "put files of that kind into one folder per class" in device.title(shown)


def test_an_address_is_decoded_to_the_query_it_encodes() -> None:
    query = FleetQuery("pi", "blocked", "lost", "head", "after", True, 3, "site=berlin")
    pairs = dict(parse_qsl(fleet.address_of(query)))
    assert fleet.query_of(pairs) == query
    assert fleet.query_of({"page": "x"}) == FleetQuery()


def test_text_from_a_device_is_escaped(db: Database) -> None:
    script = '"><script>alert(1)</script>'
    able = to_builtins(Capability("head", script, "3", head=script, notes=[script]))
    registered_devices.record(db, [DeviceRecord("main", "pi-x", "alert", why=script, capability=able)])
    report = ReportRecord("main", "pi-x", "r", script, 1, "head", 5, error=script)
    registered_reports.accept(db, report)
    registered_reports.accept(db, ReportRecord("main", "pi-x", "fit", "", 0, "head", 5, head=script))
    found, shown = fleet.read(db, "main", FleetQuery(search="pi-x")), device.read(db, "main", "pi-x")
    assert shown is not None
    drawn = cells(fleet.COLUMNS, found.rows) + cells(device.REPORTS, shown.reports)
    drawn += device.title(shown) + device.summary(shown) + device.description(shown)
    assert "<script" not in drawn and drawn.count("&lt;script&gt;") >= 7


def test_a_device_that_chose_its_head_shows_accuracy_by_labels(db: Database) -> None:
    shown = device.read(db, "main", filled.name(0))
    assert shown is not None and device.cold_start(shown) is None
    measured = {metrics.at_labels(labels, "nearest"): labels / 20 for labels in (1, 5, 10)}
    chosen = replace(shown.reports[0], metrics=measured)
    chart = device.cold_start(replace(shown, reports=(chosen,)))
    assert chart is not None and chart.options["xAxis"]["data"] == ["1", "5", "10"]
    (line,) = chart.options["series"]
    assert (line["name"], line["data"]) == ("nearest", [5.0, 25.0, 50.0])


def test_a_run_shows_its_spread_and_its_dropped_and_rejected_reports(db: Database) -> None:
    page = run.read(db, "main")
    assert page is not None and page.run.run == "toy-1"
    assert page.rounds[2].rejected == {"norm": 1} and page.rounds[3].dropped == {"timed_out": 1}
    assert page.current == {"queued": 11, "succeeded": 9} and "9 of 20" in run.summary(page)
    shown = cells(run.ROUNDS, page.rounds)
    assert "1 timed out" in shown and "1 norm" in shown
    assert 'data-act="stop:toy-1"' in run.title(page)


def test_a_chart_has_a_band_of_one_std_around_each_mean(db: Database) -> None:
    page = run.read(db, "main")
    chart = run.curves(page) if page else None
    assert chart is not None
    low, band, line = chart.options["series"][:3]
    mean = 0.93 - 0.5 * 0.75
    assert (low["data"][0], line["data"][0]) == (round(100 * (mean - 0.09), 1), round(100 * mean, 1))
    assert band["data"][0] == 18.0 and band["stack"] == low["stack"] and len(line["data"]) == filled.ROUNDS


def test_a_completed_run_shows_the_metrics_of_its_final_personalisation(db: Database) -> None:
    page = run.read(db, "main")
    tile = '<dd class="big">97.5<div class="quiet">n = 20, final</div></dd>'
    assert page is not None and tile not in run.summary(page)
    final = replace(page, final={metrics.PERSONAL_AFTER: Summary(0.975, 0.97, 0.01, 0.9, 20)})
    assert tile in run.summary(final)


def test_missing_runs_and_devices_have_an_empty_state(db: Database) -> None:
    assert run.read(db, "main", "nothing") is None and device.read(db, "main", "pi-none") is None
    assert "No run yet" in run.absent("") and "Unknown run" in run.absent("nothing")
    assert "Unknown device" in device.absent("pi-none")


def test_an_empty_registry_has_a_page_of_every_kind() -> None:
    db = Database.open()
    assert "No device yet" in fleet.note(fleet.read(db, "main", FleetQuery()))
    assert "No release yet" in releases.current(releases.read(db, "main"))
    assert "No data reported yet" in data.body(data.read(db, "main"))
    assert log.newest(db, "main") == () and "No events" in log.NOTE
    assert run.read(db, "main") is None


def test_the_area_of_a_dot_is_its_count() -> None:
    chart = charts.dots({"a": (100, 25), "b": (0, 100)})
    assert chart is not None
    points = {tuple(point["value"]): point["symbolSize"] for point in chart.options["series"][0]["data"]}
    assert points == {(0, 0): 20.0, (1, 0): 10.0, (1, 1): 20.0}


def hostile(db: Database) -> None:
    """A device whose every text and count is as large as a message may have it."""
    text = "x" * 2000
    able = Capability(
        "head", "m" * 200, "3" * 200, samples=MAX_SAMPLES, samples_per_class=[MAX_SAMPLES] * 1024,
        head=text, agent="9" * 200, notes=[text] * 64, drift=1e12,
    )  # fmt: skip
    capability = to_builtins(able)
    registered_devices.record(db, [DeviceRecord("main", "pi-x", "alert", why=text, capability=capability)])
    for number in range(3):
        fit = ReportRecord("main", "pi-x", f"fit-{number}", text, 1, "head", 5, head=text, error=text)
        registered_reports.accept(db, fit)
    registered_reports.accept(db, ReportRecord("main", "pi-x", "fit", "", 0, "head", 5, head=text))


def test_one_device_does_not_fill_the_pages_of_all(db: Database) -> None:
    hostile(db)
    (row,) = fleet.read(db, "main", FleetQuery(search="pi-x")).rows
    drawn = {one.label: one.draw(row) for one in fleet.COLUMNS}
    assert max(map(len, drawn.values())) < 1000 and "more than 100 σ" in drawn["Drift"]
    shown = device.read(db, "main", "pi-x")
    assert shown is not None
    notes = device.description(shown)
    assert notes.count("<li>") == device.MOST_NOTES + 1 and "52 further notes" in notes
    assert len(notes) < 8000 and "x" * 121 not in device.summary(shown)
    assert "x" * 401 not in cells(device.REPORTS[-1:], shown.reports)
    assert all("x" * 401 not in log.text(event) for event in log.newest(db, "main"))


def test_classes_that_the_fleet_does_not_have_are_not_drawn(db: Database) -> None:
    before = data.read(db, "main")
    hostile(db)
    registered_devices.record(
        db, [DeviceRecord("main", "a", "ready", capability={"samples": 8, "samples_per_class": [3, 5]})]
    )
    for known in (0, filled.CLASSES):  # without the releases as many as most devices have
        page = data.read(db, "main", classes=known, per_page=1000)
        assert page.beyond == ("pi-x",) and page.counts["a"] == (3, 5)
        assert set(map(len, page.counts.values())) == {2, filled.CLASSES}
        text = data.body(page)
        assert "1 device (pi-x) reported some" in text and f'<dd class="big">{filled.CLASSES}</dd>' in text
        assert re.search(r"Most of one device</dt><dd[^>]*>100,000,000 <a [^>]*>pi-x</a>", text)
    assert not before.beyond and "beyond" not in data.body(before)


def test_the_number_of_classes_is_that_of_the_newest_release_where_it_is_known(
    db: Database, tmp_path: Path
) -> None:
    manifest = graphs.manifest_for(graphs.graph(), release=1)
    Repository(tmp_path / "home" / "main").publish(manifest)
    assert PageContext(db, "main", tmp_path / "home").classes == len(manifest.classes) > 0
    assert PageContext(db, "main", tmp_path / "elsewhere").classes == 0 == PageContext(db, "main").classes


def test_one_device_does_not_make_the_dots_of_all_others_equal() -> None:
    honest = {"a": (100, 25), "b": (0, 100), "c": (64, 0)}
    chart = charts.dots({**honest, "x": (10**7, 10**7)})
    assert chart is not None
    sizes = {tuple(point["value"]): point["symbolSize"] for point in chart.options["series"][0]["data"]}
    assert (sizes[0, 0], sizes[1, 0], sizes[0, 3]) == (6.3, 3.2, 20.0)
    assert "1,000 or more</li>" in chart.legend and "or more" not in getattr(
        charts.dots(honest), "legend", ""
    )


def test_axes_have_names_and_the_area_of_a_dot_a_legend() -> None:
    chart = charts.dots({"a": (100, 25), "b": (0, 100)})
    bars = charts.columns([3, 0, 5])
    assert chart is not None and bars is not None
    assert (chart.options["xAxis"]["name"], chart.options["yAxis"]["name"]) == ("class", "device")
    assert (bars.options["xAxis"]["name"], bars.options["yAxis"]["name"]) == ("class", "samples")
    sizes = dict(re.findall(r"width:([\d.]+)px[^<]*</i>([\d,]+)<", chart.legend))
    assert sizes == {"6.3": "10", "11.5": "33", "20.0": "100"}  # areas of 1, 3.3 and 10


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [
        (0.37, 0.98, (20, 100, 20)),
        (0.912, 0.93, (91, 96, 1)),
        (1.0, 1.0, (95, 100, 1)),
        (0.0, 0.0, (0, 5, 1)),
    ],
)
def test_an_axis_of_accuracy_begins_and_ends_with_a_whole_step(
    low: float, high: float, ends: tuple[int, ...]
) -> None:
    chart = charts.lines([charts.ChartCurve("a", {1: low, 2: high})], "round")
    assert chart is not None
    axis = chart.options["yAxis"]
    assert (axis["min"], axis["max"], axis["interval"]) == ends


def test_the_log_is_newest_first_and_can_be_narrowed(db: Database) -> None:
    every = log.newest(db, "main")
    assert [event.at for event in every] == sorted((event.at for event in every), reverse=True)
    assert {"run", "round", "release", "roll-out", "rejected", "request", "quarantine", "revoked"} == {
        e.kind for e in every
    }
    assert {event.level for event in log.newest(db, "main", "error")} == {"error"}


@pytest.mark.parametrize(
    ("search", "kinds"),
    [
        ("TOY-1", {"run", "round", "release"}),  # in subjects and texts
        ("timed out", {"request"}),  # as the page writes it
        (filled.name(filled.QUARANTINED), {"rejected", "quarantine"}),
        ("much larger than allowed", {"rejected", "quarantine"}),  # the meaning of "norm", in the page only
        ("quarantine", {"quarantine"}),
        ("100%", set()),
    ],
)
def test_the_log_is_searched_by_the_words_on_the_page(db: Database, search: str, kinds: set[str]) -> None:
    found = log.newest(db, "main", search=search)
    assert {event.kind for event in found} == kinds
    if " " in search:
        assert all(search in log.text(event) for event in found)


def test_a_search_finds_any_device_of_equal_events(db: Database) -> None:
    for number in (1, 2, 3):
        rejection = RejectionRecord("main", filled.name(number), f"r-{number}", "toy-1", 9, "replayed", "")
        registered_reports.reject(db, rejection)
    (event,) = log.newest(db, "main", search=filled.name(2), level="warning", without=("request",))
    assert (event.subject, event.subjects) == (filled.name(2), 3)


def test_a_search_reads_the_whole_log_and_not_its_newest_events(db: Database) -> None:
    many = [
        ReleaseRecord(
            "main", number, "toy-9", 1, "fedrep", "0" * 64, 1, published_at=f"2026-12-{number % 28 + 1:02d}"
        )
        for number in range(10, 10 + 2 * log.NEWEST)
    ]
    filled.add(db, tables.releases, *many)
    assert "toy-0" not in {event.subject for event in log.newest(db, "main")}
    assert len(log.newest(db, "main", search="toy-0")) == 2
    assert "The newest 200 events" in log.note(log.read(db, "main", LogQuery()), LogQuery())


def test_the_log_is_narrowed_to_days_of_which_equal_events_are_counted(db: Database) -> None:
    with db.writing() as connection:
        connection.execute(tables.rejections.delete())
    for number, day in enumerate((1, 2, 2, 3), 1):
        made = RejectionRecord("main", "pi-x", f"t-{number}", "toy-1", day, "norm", "", number=number)
        filled.add(db, tables.rejections, replace(made, received_at=f"2026-11-0{day}T23:59:59.000+00:00"))

    def rejected(since: str, until: str) -> list[int]:
        page = log.read(db, "main", LogQuery(since=since, until=until))
        return [event.times for event in page.events if event.kind == "rejected"]

    assert rejected("", "") == rejected("2026-11-01", "2026-11-03") == [4]
    assert rejected("2026-11-02", "2026-11-02") == [2]
    assert rejected("2026-11-03", "") == rejected("", "2026-11-01") == [1]
    assert rejected("2026-11-04", "9999-12-31") == rejected("", "2026-10-31") == []


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [
        ("yesterday", "", "from: 'yesterday', expected a day such as 2026-11-20"),
        ("", "2026-02-30", "to: '2026-02-30', expected a day"),
        ("2026-11-02", "2026-11-01", "from 2026-11-02 to 2026-11-01: expected the earlier day first"),
    ],
)
def test_a_wrong_day_is_named(db: Database, since: str, until: str, message: str) -> None:
    query = LogQuery(since=since, until=until)
    page = log.read(db, "main", query)
    assert page.wrong.startswith(message) and page.events == () and "Wrong date" in log.note(page, query)


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("stopped", "stopped by SIGTERM", "stopped by SIGTERM"),
        ("stopped", "stopped on request", "stopped on request"),
        ("budget_exhausted", "pi-1 has spent its budget", "budget exhausted: pi-1 has spent its budget"),
        ("failed", "1 of 2 clients responded", "failed: 1 of 2 clients responded"),
    ],
)
def test_the_log_says_once_how_a_run_ended(db: Database, state: RunEnd, reason: str, said: str) -> None:
    runs.begin(db, RunRecord("ended", "main", "fedrep", "digits", "fleet", 9, "/tmp/ended"))
    runs.end(db, "ended", state, reason)
    (event, _) = [event for event in log.newest(db, "main") if event.subject == "ended"]
    assert log.plain(event) == said


def test_the_address_of_the_log_has_its_query() -> None:
    query = LogQuery("error", "pi 7&8", "2026-11-01", "2026-11-02")
    address = log.address_of(query)
    assert address == "/log?level=error&search=pi+7%268&from=2026-11-01&to=2026-11-02"
    assert log.query_of(dict(parse_qsl(address.partition("?")[2]))) == query
    assert log.address_of(LogQuery()) == "/log"


def test_actions_write_the_desired_state(db: Database) -> None:
    context = PageContext(db, "main")
    actions.start(context, "2")
    begun = rollouts.current(db, "main")
    assert begun is not None and (begun.release, begun.previous, begun.plan["stages"]) == (2, 3, [1.0])
    with pytest.raises(InputError, match="has not ended"):
        actions.start(context, "3")
    with pytest.raises(InputError, match="the roll-back from release 3 is under way already"):
        actions.ACTIONS["rollback"].do(context, str(begun.number))
    actions.ACTIONS["abort"].do(context, str(begun.number))
    wanted = rollouts.get(db, begun.number)
    assert wanted is not None and wanted.desired == "aborted"
    actions.ACTIONS["stop"].do(context, "toy-1")
    stopped = runs.get(db, "toy-1")
    assert stopped is not None and stopped.desired == "stopped"
    with pytest.raises(InputError, match="it has ended"):
        actions.ACTIONS["abort"].do(context, "1")


def test_a_roll_out_under_way_shows_its_stages_and_its_buttons(db: Database) -> None:
    number = rollouts.begin(db, "main", 3, previous=2, plan={"stages": [0.05, 0.25, 1.0]})
    shown = releases.current(releases.read(db, "main"))
    assert "stage 1 of 3, up to 5% of the fleet" in shown and f'data-act="rollback:{number}"' in shown
    rollouts.steer(db, number, "paused")
    waiting = releases.current(releases.read(db, "main"))
    assert "pause requested; waiting for a server" in waiting and "edge-fl release pause" in waiting
    assert "data-act" not in waiting


def visit(address: str = "/", token: str = "", **headers: str) -> httpx.Response:
    app = LoginMiddleware(Starlette(routes=[Route("/", lambda request: PlainTextResponse("inside"))]), token)

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
            return await client.get(address, headers=headers)

    return run_coroutine(get())


def test_loopback_accepts_only_its_own_names() -> None:
    assert visit().text == "inside"
    assert visit(host="evil.example:8080").status_code == 403
    assert visit(origin="http://evil.example").status_code == 403
    assert [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "10.0.0.1", "a.b")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_elsewhere_the_token_is_required_and_leaves_the_address() -> None:
    assert visit(token=TOKEN).status_code == 401
    assert visit("/?token=wrong", TOKEN).status_code == 401
    entered = visit(f"/?token={TOKEN}&sort=after", TOKEN)
    assert (entered.status_code, entered.headers["location"]) == (303, "/?sort=after")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie and visit(token=TOKEN, cookie=cookie.partition(";")[0]).text == "inside"
    assert visit(token=TOKEN, authorization=f"Bearer {TOKEN}").text == "inside"
    with pytest.raises(ConfigError, match="expected at least 16"):
        DashboardSettings("x", token="short")


def test_metrics_are_read_by_prometheus_own_parser(db: Database) -> None:
    families = {f.name: f for f in text_string_to_metric_families(prometheus.text(db, "main").decode())}
    ready = [s for s in families["edge_fl_devices"].samples if s.labels["status"] == "ready"]
    assert sum(sample.value for sample in ready) == 83 and {s.labels["tier"] for s in ready} == {
        "head",
        "full",
    }
    assert families["edge_fl_rejected_reports"].samples[0].labels["reason"] == "norm"
    blocked = {s.labels["why"]: s.value for s in families["edge_fl_devices_blocked"].samples}
    assert blocked == {"quarantined": 1, "revoked": 1}
    assert [s.value for s in families["edge_fl_devices_outliers"].samples] == [1]
    registered_devices.count_dropped(db, "main", filled.name(5), 40)
    registered_devices.count_dropped(db, "main", filled.name(6), 2)
    families = {f.name: f for f in text_string_to_metric_families(prometheus.text(db, "main").decode())}
    assert [s.value for s in families["edge_fl_dropped_messages"].samples] == [42]
    lasted = {s.name: s.value for s in families["edge_fl_round_duration_seconds"].samples}
    assert lasted["edge_fl_round_duration_seconds_count"] == filled.ROUNDS
    updates = sum(row.responded for row in runs.rounds_of(db, "toy-1"))
    moved = (96 * 3 - 1) * 52_900 + 119_000 * updates
    assert sum(s.value for s in families["edge_fl_bytes"].samples) == moved
    page = run.read(db, "main", "toy-1")
    assert page is not None and page.traffic.down + page.traffic.up == moved  # all was for this run
    assert sum(row.down + row.up for row in page.rounds) == moved
    assert f"{units.size(page.traffic.down)} down, {units.size(page.traffic.up)} up" in run.summary(page)


def test_metrics_are_named_as_prometheus_requires(db: Database) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool: none on this machine (Debian's package prometheus)")
    found = subprocess.run(
        [promtool, "check", "metrics"], input=prometheus.text(db, "main"), capture_output=True
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, b"")


def test_the_grafana_dashboard_uses_existing_metrics(db: Database) -> None:
    board = json.loads((Path(prometheus.__file__).parent / "grafana.json").read_text())
    text = json.dumps(board)
    names = {
        s.name
        for f in text_string_to_metric_families(prometheus.text(db, "main").decode())
        for s in f.samples
    }
    used = {name for target in _targets(board) for name in re.findall(r"edge_fl_\w+", target)}
    assert {"edge_fl_devices", "edge_fl_bytes_total", "edge_fl_rejected_reports_total"} <= used <= names
    assert all("edge_fl_" in target for target in _targets(board))
    assert "http" not in text


def _targets(board: dict) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(
    ("passed", "expected"), [(3, "now"), (45, "40 s"), (600, "10 min"), (7300, "2 h"), (400_000, "4 d")]
)
def test_times_are_coarse(passed: int, expected: str) -> None:
    then = datetime.fromtimestamp(NOW.timestamp() - passed, UTC).isoformat()
    assert units.ago(then, NOW) == expected


def test_sizes_and_shares_are_short() -> None:
    assert [units.size(n) for n in (0, 1023, 1536, 52_900_000)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "50.4 MiB",
    ]
    assert (units.share(0.9312), units.share(None), units.share(float("nan"))) == (
        "93.1",
        "-",
        "-",
    )
    assert replace(FleetQuery(), page=2).page == 2


def test_the_operators_page_describes_every_page_of_the_menu() -> None:
    text = (Path(__file__).parents[3] / "docs/quick-start-operator.md").read_text()
    assert dict(map(reversed, re.findall(r"^\| \*(\w+)\* \(`(/\w*)`\)", text, re.MULTILINE))) == MENU
