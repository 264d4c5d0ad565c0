"""What the dashboard shows, without a browser: its queries, its pages, its buttons, its door, its metrics."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from edge_fl import metrics
from edge_fl.errors import ConfigError, InputError
from edge_fl.metrics import Summary
from edge_fl.wire.messages import Capability
from server.dashboard import actions, prometheus
from server.dashboard.auth import TokenAuth, is_loopback
from server.dashboard.pages import data as data_page
from server.dashboard.pages import device as device_page
from server.dashboard.pages import fleet as fleet_page
from server.dashboard.pages import log as log_page
from server.dashboard.pages import releases as releases_page
from server.dashboard.pages import run as run_page
from server.dashboard.queries import data, device, fleet, log, releases, run
from server.dashboard.queries.fleet import FleetQuery
from server.dashboard.serve import Settings
from server.registry import Database, reports, rollouts, runs
from server.registry import devices as registered
from server.registry.records import DeviceRecord, ReportRecord
from server.report import formatting, svg
from tests.server.dashboard import filled

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
TOKEN = "a-token-of-some-length"


@pytest.fixture
def db(tmp_path: Path) -> Database:
    db = Database.open()
    filled.fill(db, 120, tmp_path)
    return db


def test_a_page_of_the_fleet_is_sorted_and_cut_by_the_database(db: Database) -> None:
    first = fleet.page(db, "main", FleetQuery(), per_page=50)
    assert [row.device for row in first.rows] == [filled.name(n) for n in range(50)]
    assert (first.found, first.total, first.pages) == (120, 120, 3)
    last = fleet.page(db, "main", FleetQuery(page=99), per_page=50)
    assert (last.page, len(last.rows)) == (2, 20)


@pytest.mark.parametrize("sort", [key for key, *_ in fleet_page.COLUMNS if key])
def test_every_column_sorts_both_ways(db: Database, sort: str) -> None:
    field = {"seen": "seen_at"}.get(sort, sort)
    _say_today(db)
    for down in (False, True):
        found = [
            getattr(row, field)
            for row in fleet.page(db, "main", FleetQuery(sort=sort, down=down), per_page=200).rows
        ]
        found = [-1.0 if value is None else value for value in found]
        assert found == sorted(found, reverse=down)
    assert len({*found}) > 1


def _say_today(db: Database) -> None:
    """Devices told something today under two methods, the more the higher their number; and one more is there, which has drifted."""
    able = to_builtins(Capability("head", "test", "3", samples=3, drift=1.2))
    registered.record(db, [DeviceRecord("main", "pi-y", "ready", capability=able)])
    for number in range(1, 12):
        kind, run = ("update", "toy-0") if number % 2 else ("head", "toy-1")
        told = {metrics.EPSILON: number / 4} if kind == "update" else {}
        sent = ReportRecord(
            "main",
            filled.name(number),
            f"today-{number}",
            run,
            9,
            kind,
            5,
            told,
            after=0.5,
            bytes_up=number * 100,
        )
        reports.accept(db, sent)


def test_only_a_fleet_that_sends_noisy_updates_has_a_column_for_what_they_told(db: Database) -> None:
    assert "Epsilon" not in fleet_page.table(fleet.page(db, "main", FleetQuery()), FleetQuery(), NOW)
    _say_today(db)
    found = fleet.page(db, "main", FleetQuery())
    assert [row.epsilon for row in found.rows[:6]] == [None, 0.25, None, 0.75, None, 1.25]
    assert "Epsilon" in (shown := fleet_page.table(found, FleetQuery(), NOW)) and ">1.25<" in shown


def test_search_and_filters_narrow_the_fleet(db: Database) -> None:
    assert fleet.page(db, "main", FleetQuery(search="0011")).found == 11
    assert fleet.page(db, "main", FleetQuery(search="%")).found == 0
    lost = fleet.page(db, "main", FleetQuery(status="lost"))
    assert {row.status for row in lost.rows} == {"lost"} and lost.by_status["ready"] == 84
    assert {row.tier for row in fleet.page(db, "main", FleetQuery(tier="full")).rows} == {"full"}


def test_a_row_says_what_its_newest_report_says(db: Database) -> None:
    row = fleet.page(db, "main", FleetQuery(search="pi-00004")).rows[0]
    report = device.page(db, "main", "pi-00004")
    assert report is not None
    assert (row.before, row.after) == (report.reports[0].before, report.reports[0].after)
    assert report.reports[0].release == 3 and row.method == "fedrep"


def test_a_row_says_how_far_a_device_drifted(db: Database) -> None:
    said = Capability("head", "test", "3", drift=1.24)
    registered.record(db, [DeviceRecord("main", "pi-x", "ready", why="drift", capability=to_builtins(said))])
    found = fleet.page(db, "main", FleetQuery(search="pi-x"))
    assert found.rows[0].drift == 1.24 and "1.2 σ" in fleet_page.table(found, FleetQuery(), NOW)
    assert not any(row.drift for row in fleet.page(db, "main", FleetQuery(search="pi-0")).rows)


def test_an_address_comes_back_as_the_wish_it_was_made_of() -> None:
    query = FleetQuery("pi", "lost", "head", "after", True, 3)
    pairs = dict(pair.split("=") for pair in fleet_page.address_of(query).split("&"))
    assert fleet_page.query_of(pairs) == query
    assert fleet_page.query_of({"page": "x"}) == FleetQuery()


def test_nothing_that_a_device_says_becomes_markup(db: Database) -> None:
    registered.record(db, [DeviceRecord("main", "pi-x", "alert", why='"><script>alert(1)</script>')])
    found = fleet.page(db, "main", FleetQuery(search="pi-x"))
    shown = fleet_page.table(found, FleetQuery(), NOW) + device_page.body(
        device.page(db, "main", "pi-x"), "pi-x", NOW
    )
    assert "<script" not in shown and "&lt;script&gt;" in shown


def test_a_device_that_chose_its_head_shows_how_many_labels_each_kind_needs(db: Database) -> None:
    shown = device.page(db, "main", filled.name(0))
    assert shown is not None and "by labels" not in device_page.body(shown, filled.name(0), NOW)
    told = {metrics.at_labels(labels, "nearest"): labels / 20 for labels in (1, 5, 10)}
    chosen = replace(shown.reports[0], metrics=told)
    body = device_page.body(replace(shown, reports=(chosen,)), filled.name(0), NOW)
    assert "by labels per class" in body and "nearest, labels per class 5: 25.00 %" in body


def test_a_run_shows_its_spread_its_drop_outs_and_what_was_refused(db: Database) -> None:
    page = run.page(db, "main")
    assert page is not None and page.run.run == "toy-1"
    assert page.rounds[2].refused == {"norm": 1} and page.rounds[3].ended_badly == {"timed_out": 1}
    assert page.under_way == {"queued": 11, "succeeded": 9}
    shown = run_page.body(page)
    assert "1 timed out" in shown and "1 norm" in shown and 'class="band' in shown
    assert 'data-act="stop:toy-1"' in run_page.title(page)


def test_a_run_that_has_closed_shows_what_it_came_to(db: Database) -> None:
    page = run.page(db, "main")
    tile = '<dd class="big">97.5</dd>'
    assert page is not None and tile not in run_page.body(page)
    closed = replace(page, closing={metrics.PERSONAL_AFTER: Summary(0.975, 0.97, 0.01, 0.9, 20)})
    assert tile in run_page.body(closed)


def test_runs_that_are_not_there_are_said_to_be_missing(db: Database) -> None:
    assert run.page(db, "main", "nothing") is None
    assert "No run yet" in run_page.body(None)
    assert "Never heard of" in device_page.body(None, "pi-99", NOW)


def test_an_empty_registry_has_a_page_of_every_kind() -> None:
    db = Database.open()
    assert "No device has spoken" in fleet_page.table(fleet.page(db, "main", FleetQuery()), FleetQuery(), NOW)
    assert "Nothing has been released" in releases_page.releases(releases.page(db, "main"))
    assert "has said what data" in data_page.body(data.page(db, "main"))
    assert "Nothing has happened" in log_page.body(log.newest(db, "main"))
    assert run.page(db, "main") is None


def test_dots_are_as_large_as_the_counts_they_stand_for() -> None:
    drawn = svg.dots({"a": (100, 25), "b": (0, 100)}, ("x", "y"))
    assert drawn.count('r="10.0"') == 2 and drawn.count('r="5.0"') == 1


def test_the_log_is_newest_first_and_can_be_narrowed(db: Database) -> None:
    every = log.newest(db, "main")
    assert [event.at for event in every] == sorted((event.at for event in every), reverse=True)
    assert {"run", "round", "release", "roll-out", "refused", "run_id", "quarantine"} == {
        e.kind for e in every
    }
    assert {event.level for event in log.newest(db, "main", "error")} == {"error"}


def test_buttons_write_what_is_wanted(db: Database) -> None:
    actions.start(db, "main", "2")
    begun = rollouts.current(db, "main")
    assert begun is not None and (begun.release, begun.previous, begun.plan["stages"]) == (2, 3, [1.0])
    with pytest.raises(InputError, match="on its way"):
        actions.start(db, "main", "3")
    actions.ACTIONS["rollback"].do(db, "main", str(begun.number))
    wanted = rollouts.get(db, begun.number)
    assert wanted is not None and wanted.desired == "rolled_back"
    actions.ACTIONS["stop"].do(db, "main", "toy-1")
    asked = runs.get(db, "toy-1")
    assert asked is not None and asked.desired == "stopped"
    with pytest.raises(InputError, match="it is over"):
        actions.ACTIONS["abort"].do(db, "main", "1")


def test_a_roll_out_under_way_shows_its_stages_and_its_buttons(db: Database) -> None:
    number = rollouts.begin(db, "main", 3, previous=2, plan={"stages": [0.05, 0.25, 1.0]})
    shown = releases_page.current(releases.page(db, "main"))
    assert "stage 1 of 3, up to 5% of the fleet" in shown and f'data-act="rollback:{number}"' in shown
    rollouts.steer(db, number, "paused")
    waiting = releases_page.current(releases.page(db, "main"))
    assert "asked to be paused" in waiting and "data-act" not in waiting


def visit(address: str = "/", token: str = "", **headers: str) -> httpx.Response:
    app = TokenAuth(Starlette(routes=[Route("/", lambda request: PlainTextResponse("inside"))]), token)

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
            return await client.get(address, headers=headers)

    return asyncio.run(get())


def test_loopback_answers_only_to_its_own_names() -> None:
    assert visit().text == "inside"
    assert visit(host="evil.example:8080").status_code == 403
    assert visit(origin="http://evil.example").status_code == 403
    assert [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "10.0.0.1", "a.b")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_elsewhere_the_token_is_asked_for_and_leaves_the_address() -> None:
    assert visit(token=TOKEN).status_code == 401
    assert visit("/?token=wrong", TOKEN).status_code == 401
    entered = visit(f"/?token={TOKEN}&sort=after", TOKEN)
    assert (entered.status_code, entered.headers["location"]) == (303, "/?sort=after")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie and visit(token=TOKEN, cookie=cookie.partition(";")[0]).text == "inside"
    assert visit(token=TOKEN, authorization=f"Bearer {TOKEN}").text == "inside"
    with pytest.raises(ConfigError, match="expected at least 16"):
        Settings("x", token="short")


def test_metrics_are_read_by_prometheus_own_parser(db: Database) -> None:
    families = {f.name: f for f in text_string_to_metric_families(prometheus.text(db, "main").decode())}
    ready = [s for s in families["edge_fl_devices"].samples if s.labels["status"] == "ready"]
    assert sum(sample.value for sample in ready) == 84 and {s.labels["tier"] for s in ready} == {
        "head",
        "full",
    }
    assert families["edge_fl_rejected_reports"].samples[0].labels["reason"] == "norm"
    lasted = {s.name: s.value for s in families["edge_fl_round_duration_seconds"].samples}
    assert lasted["edge_fl_round_duration_seconds_count"] == filled.ROUNDS
    assert sum(s.value for s in families["edge_fl_bytes"].samples) == 120 * 3 * 52_900


def test_metrics_are_named_as_prometheus_asks_for(db: Database) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool: none on this machine (Debian's package prometheus)")
    found = subprocess.run(
        [promtool, "check", "metrics"], input=prometheus.text(db, "main"), capture_output=True
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, b"")


def test_the_grafana_dashboard_asks_for_metrics_that_there_are(db: Database) -> None:
    board = json.loads((Path(prometheus.__file__).parent / "grafana.json").read_text())
    asked = json.dumps(board)
    names = {
        s.name
        for f in text_string_to_metric_families(prometheus.text(db, "main").decode())
        for s in f.samples
    }
    used = {name for target in _targets(board) for name in re.findall(r"edge_fl_\w+", target)}
    assert {"edge_fl_devices", "edge_fl_bytes_total", "edge_fl_rejected_reports_total"} <= used <= names
    assert all("edge_fl_" in target for target in _targets(board))
    assert "http" not in asked


def _targets(board: dict) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(
    ("passed", "said"), [(3, "now"), (45, "40 s"), (600, "10 min"), (7300, "2 h"), (400_000, "4 d")]
)
def test_times_are_coarse(passed: int, said: str) -> None:
    then = datetime.fromtimestamp(NOW.timestamp() - passed, UTC).isoformat()
    assert formatting.ago(then, NOW) == said


def test_sizes_and_shares_are_short() -> None:
    assert [formatting.size(n) for n in (0, 1023, 1536, 52_900_000)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "50.4 MiB",
    ]
    assert (formatting.share(0.9312), formatting.share(None), formatting.share(float("nan"))) == (
        "93.1",
        "–",
        "–",
    )
    assert replace(FleetQuery(), page=2).page == 2
