"""The overview: what needs attention, what personalisation gains on the same devices, and what changed; the list and the log behind it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import update

from edge_fl import metrics
from edge_fl_console import accuracy
from edge_fl_console.alerts import stored
from edge_fl_console.dashboard import parts
from edge_fl_console.dashboard.context import PageContext
from edge_fl_console.dashboard.pages import fleet, log, overview, run
from edge_fl_console.dashboard.pages.fleet import FleetQuery
from edge_fl_server.registry import (
    Database,
    fleets,
    registered_devices,
    registered_reports,
    rollouts,
    runs,
    tables,
)
from edge_fl_server.registry.tables import (
    DeviceRecord,
    RejectionRecord,
    ReportRecord,
    RequestRecord,
    RoundRecord,
    RunRecord,
)
from edge_fl_server.runs import round_metrics, summaries
from edge_fl_server.runs.round_metrics import RoundMetrics
from edge_fl_server.runs.summaries import Paired
from tests.console.dashboard import filled

GLOBAL, BEFORE, AFTER, LOCAL = (
    metrics.GLOBAL_TEST,
    metrics.PERSONAL_BEFORE,
    metrics.PERSONAL_AFTER,
    metrics.LOCAL_ONLY,
)


@pytest.fixture
def db(tmp_path: Path) -> Database:
    db = Database.open(tmp_path / "registry.sqlite")
    filled.fill(db, 40, tmp_path)
    return db


def measured(db: Database, device: str, kind: str, round: int, values: Mapping[str, float]) -> None:
    id = f"{device}-{kind}-{round}"
    registered_reports.accept(db, ReportRecord("main", device, id, "toy-1", round, kind, 9, dict(values)))


def test_everything_that_needs_attention_is_an_item_with_a_link(db: Database) -> None:
    page = overview.read(db, "main")
    found = {item.link: item.text for item in overview.items(page)}
    assert found == {
        "/log": "No server seen yet",
        "/fleet?only=quarantine": "1 device in quarantine, whose reports do not count",
        "/fleet?only=failing": "4 devices in alert",
        "/fleet?only=lost": "4 devices lost: power, network or memory",
        "/fleet?only=outlier": "1 device with an update that differs strongly from the others'",
    }
    assert page.attention == 9
    with db.writing() as connection:
        connection.execute(
            update(tables.devices).where(tables.devices.c.quarantine != "").values(status="lost")
        )
    assert overview.read(db, "main").attention == 9  # it counts once
    shown = overview.health(page, PageContext(db, "other").command("server up"))
    assert "edge-fl server up --fleet other" in shown and "4 × enospc: the card is full" in shown


def test_alerts_that_are_not_about_a_device_are_items(db: Database) -> None:
    before = list(overview.items(overview.read(db, "main")))
    raised = [("disk", "server", "90 MB free at /srv"), ("decile", "release 3", "bottom decile 80.0 %")]
    stored.update_active(db, "main", [*raised, ("disk", filled.name(1), "400 MB free")], (), 1)
    found = list(overview.items(overview.read(db, "main")))[len(before) :]
    assert [(item.text, item.link, item.detail) for item in found] == [
        ("Alert decile: release 3", "/releases", "bottom decile 80.0 %"),
        ("Alert disk: server", "/log", "90 MB free at /srv"),
    ]


def test_a_release_that_is_worse_beyond_chance_needs_attention(db: Database) -> None:
    page = overview.read(db, "main")

    def texts(low: float, high: float, *, rolled_back: bool = False) -> list[str]:
        found = Paired((low + high) / 2, low, high, 8, 0.95, 0.91)
        change = accuracy.Change(3, 2, rolled_back, found)
        return [item.text for item in overview.items(replace(page, change=change))]

    assert "Release 3 is worse than release 2" in texts(-0.07, -0.004)
    for other in (texts(-0.07, 0.004), texts(-0.07, -0.004, rolled_back=True)):
        assert not any("worse" in text for text in other)


def test_without_the_files_of_its_releases_a_server_cannot_be_started_here(db: Database) -> None:
    page = overview.read(db, "main")
    assert "cannot be continued" in overview.health(page, elsewhere=True)
    assert "cannot be continued" not in overview.health(page)


def test_a_healthy_fleet_says_so(tmp_path: Path) -> None:
    db = Database.open(tmp_path / "registry.sqlite")
    registered_devices.record(db, [DeviceRecord("main", "pi-0", "ready")])
    fleets.begin(db, "main", 1)
    shown = overview.health(overview.read(db, "main"))
    assert "Nothing needs attention: 1 device, and a server is online." in shown
    empty = overview.summary(overview.read(db, "other"), "other")
    assert "Fleet other has no device and no run. This registry has devices of: main" in empty


def test_a_gain_is_over_the_devices_that_measured_both(db: Database) -> None:
    for device, shared, own in (("pi-0", 0.5, 0.8), ("pi-1", 0.7, 0.8), ("pi-2", 0.6, 0.9)):
        measured(db, device, "evaluation", 9, {GLOBAL: shared, BEFORE: own})
    measured(db, "pi-3", "evaluation", 9, {GLOBAL: 0.1})
    measured(db, "pi-0", "evaluation", 8, {GLOBAL: 0.0, BEFORE: 1.0})  # an earlier round
    page = overview.read(db, "main")
    assert page.full is not None and (page.full.run, page.full.round) == ("toy-1", 9)
    (gain,) = page.full.gains
    assert (gain.baseline, gain.found.n) == (GLOBAL, 3)
    assert (gain.found.before, gain.found.after) == (pytest.approx(0.6), pytest.approx(2.5 / 3))
    low, high = metrics.interval([0.3, 0.1, 0.3])
    assert (gain.found.mean, gain.found.low, gain.found.high) == pytest.approx((0.7 / 3, low, high))
    shown = overview.gained(page)
    assert "+23.3 points" in shown and "n = 3" in shown and "60.0 → 83.3" in shown
    assert "not distinguishable from chance" in shown and "Local-only baseline: not measured" in shown


def test_the_final_personalisation_and_local_only_are_compared_where_known(db: Database) -> None:
    for device in ("pi-0", "pi-1"):
        measured(db, device, "evaluation", 12, {BEFORE: 0.8, LOCAL: 0.6})
        measured(db, device, "personal", 12, {AFTER: 0.9})
    page = overview.read(db, "main")
    assert page.full is not None
    assert [gain.baseline for gain in page.full.gains] == [LOCAL, BEFORE]
    assert "Local-only baseline" not in overview.gained(page)


def test_sums_of_a_database_give_the_same_interval_as_the_values() -> None:
    before, after = {"a": 0.5, "b": 0.7, "c": 0.2}, {"a": 0.8, "b": 0.6, "c": 0.9, "d": 1.0}
    found = summaries.paired(before, after)
    gained = [0.3, -0.1, 0.7]
    summed = summaries.of_differences(3, sum(gained) / 3, sum(one * one for one in gained) / 3)
    assert found is not None and summed is not None
    assert (summed.mean, summed.low, summed.high) == pytest.approx((found.mean, found.low, found.high))
    assert summaries.of_differences(0, 0.0, 0.0) is None


def test_a_refit_does_not_replace_the_comparison_of_its_release(db: Database) -> None:
    able = {"tier": "head"}
    registered_devices.record(db, [DeviceRecord("main", "pi-x", "ready", release=9, capability=able)])
    for id, before, after in (("rel-9", 0.9, 0.95), ("refit", 0.95, 0.96)):
        accuracy.head_reports(db, "main")  # what it knows by now is no obstacle
        registered_reports.accept(
            db, ReportRecord("main", "pi-x", id, "toy-1", 1, "head", 9, {}, before, after, 9)
        )
    found = accuracy.head_reports(db, "main")[9]
    assert (found.gain.before, found.gain.after, found.after) == (0.9, 0.95, 0.96)


def test_the_list_begins_with_what_needs_attention_and_can_be_narrowed(db: Database) -> None:
    page = fleet.read(db, "main", FleetQuery())
    statuses = [row.standing or row.status for row in page.rows]
    assert statuses[:9] == ["quarantined", *["alert"] * 4, *["lost"] * 4] and "lost" not in statuses[9:]
    assert page.by_only == {"attention": 9, "blocked": 2, "quarantined": 1, "revoked": 1}
    assert fleet.read(db, "main", FleetQuery(only="attention")).matches == 9
    blocked = fleet.read(db, "main", FleetQuery(only="blocked")).rows
    assert {row.device: row.standing for row in blocked} == {
        filled.name(6): "revoked",
        filled.name(7): "quarantined",
    }
    assert fleet.read(db, "main", FleetQuery(only="anything")).matches == 40


def test_a_row_gives_the_reason_and_the_buttons(db: Database) -> None:
    (row,) = fleet.read(db, "main", FleetQuery(only="quarantined")).rows
    assert fleet.message(row) == (
        "3 reports rejected, the last one because its update is much larger than allowed;"
        " its newest update differs strongly from the others'"
    )
    (cells,) = parts.cells(fleet.COLUMNS, [row])
    assert "admit:pi-00007" in cells["attention"] and "revoke:pi-00007" in cells["attention"]
    (row,) = fleet.read(db, "main", FleetQuery(only="revoked")).rows
    assert "edge-fl fleet enrol pi-00006" in fleet.message(row)


def test_the_log_groups_equal_events(db: Database) -> None:
    for number in range(5):
        detail = f"an update of norm {900 + number}"
        registered_reports.reject(
            db, RejectionRecord("main", "pi-x", f"u-{number}", "toy-1", number, "norm", detail)
        )
        request = RequestRecord("main", f"pi-{number % 3}", f"e-{number}", "toy-1", number, "evaluate")
        runs.add_requests(db, [request])
        runs.settle_requests(db, "main", request.id, "timed_out")
    events = log.newest(db, "main")
    (rejected,) = (event for event in events if event.subject == "pi-x")
    assert (rejected.times, rejected.first < rejected.at) == (5, True)
    assert "its update is much larger than allowed (norm): an update of norm 904" in log.text(rejected)
    assert "5 times since" in log.text(rejected)
    (late,) = (event for event in events if event.text.startswith("evaluate"))
    assert (late.times, late.subjects) == (5, 3) and "and 2 more" in log.subject(late)
    rounds = {event.text: event.times for event in events if event.kind == "round"}
    assert rounds == {"rounds 5–12: 7 of 7 responded": filled.ROUNDS - 4, "rounds 1–4: 6 of 7 responded": 4}
    shown = [log.text(event) for event in events if event.kind == "round"]
    assert all("times" not in text and "since" in text for text in shown)


def test_the_log_has_one_event_for_the_messages_of_many_devices_that_somebody_replays(db: Database) -> None:
    for number in range(50):
        detail = "state is older than one received before"
        registered_reports.reject(
            db, RejectionRecord("main", f"pi-{number:05d}", "state", "", 0, "replayed", detail)
        )
    (replayed,) = (event for event in log.newest(db, "main") if event.text.startswith("replayed"))
    assert (replayed.times, replayed.subjects) == (50, 50) and "and 49 more" in log.subject(replayed)


def test_a_paused_roll_out_is_a_warning_and_a_replaced_one_is_not_red(db: Database) -> None:
    for state, reason in (
        ("replaced", "replaced by release 4"),
        ("paused", "stage 1: 1 of 3 devices succeeded"),
    ):
        record = rollouts.get(db, rollouts.begin(db, "main", 4, previous=3))
        rollouts.advance(db, record, state=state, reason=reason)
    found = {
        event.text.partition(":")[0]: event for event in log.newest(db, "main") if event.kind == "roll-out"
    }
    assert (found["paused"].level, found["replaced"].level) == ("warning", "info")
    assert log.text(found["replaced"]) == "replaced by release 4"
    assert "bad" not in parts.word("replaced") and "warn" in parts.word("paused")
    page = overview.read(db, "main")
    assert "The roll-out of release 4 is paused" in {item.text for item in overview.items(page)}


def test_full_and_head_only_devices_have_separate_means(db: Database, tmp_path: Path) -> None:
    clients = {filled.name(2): {AFTER: 0.9}, filled.name(1): {AFTER: 0.5}, filled.name(0): {AFTER: 0.7}}
    with (tmp_path / round_metrics.FILE).open("ab") as file:
        summary = metrics.summarise_reports(list(clients.values()))
        file.write(round_metrics.encode(RoundMetrics(round=12, final=True, metrics=summary, clients=clients)))
    page = run.read(db, "main")
    assert page is not None and (page.final[AFTER].mean, page.heads[AFTER].mean) == (0.9, 0.6)
    shown = run.summary(page)
    assert '90.0<div class="quiet">n = 1, final' in shown and '60.0<div class="quiet">n = 2' in shown


def test_a_round_without_evaluation_says_so(db: Database) -> None:
    runs.begin(db, RunRecord("toy-2", "main", "fedavg", "digits", "fleet", 2, ""))
    runs.record_round(db, RoundRecord("toy-2", 1, 3, 3, 1.0))
    page = run.read(db, "main", "toy-2")
    assert page is not None
    (cells,) = parts.cells(run.ROUNDS, page.rounds)
    assert "not evaluated" in cells["personal"] and "global" not in run.visible(page)


def test_the_state_of_the_server_is_in_plain_words(db: Database) -> None:
    assert "no server yet" in parts.server_state(fleets.presence(db, "main"))
    fleets.begin(db, "main", 1)
    shown = parts.server_state(fleets.presence(db, "main"))
    assert "online" in shown and "since 2" in shown and "UTC" in shown


def test_full_devices_without_a_baseline_show_their_mean_and_no_gain(db: Database) -> None:
    for device, own in (("pi-0", 0.9), ("pi-1", 0.8)):
        measured(db, device, "personal", 12, {AFTER: own})
    page = overview.read(db, "main")
    assert page.full is not None and (page.full.n, page.full.gains) == (2, ())
    shown = overview.gained(page)
    assert '85.0 % <span class="quiet">(n = 2)</span>,' in shown and "no shared model to compare" in shown
