"""Figures that would mislead: means over other devices, over few, or over none; devices that are counted twice."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_fl import metrics
from edge_fl.metrics import Summary
from edge_fl_console import accuracy
from edge_fl_console.dashboard import charts, prometheus
from edge_fl_console.dashboard.pages import device, releases, run
from edge_fl_server.registry import Database, registered_devices, registered_reports, rollouts, runs
from edge_fl_server.registry import rollouts as released
from edge_fl_server.registry.tables import (
    DeviceRecord,
    ReleaseRecord,
    ReportRecord,
    RequestRecord,
    RoundRecord,
    RunRecord,
)
from edge_fl_server.release import compare
from edge_fl_server.runs import summaries

BEFORE = metrics.PERSONAL_BEFORE


def summary(mean: float, clients: int) -> Summary:
    return Summary(mean, mean, 0.1, mean, clients)


@pytest.fixture
def db(tmp_path: Path) -> Database:
    db = Database.open(tmp_path / "registry.sqlite")
    runs.begin(db, RunRecord("toy", "main", "fedrep", "digits", "fleet", 9, str(tmp_path)))
    return db


def head(db: Database, device: str, id: str, after: float | None, before: float | None = None) -> None:
    serves(db, device, 2)
    registered_reports.accept(db, ReportRecord("main", device, id, "toy", 1, "head", 9, {}, before, after, 2))


def serves(db: Database, device: str, release: int) -> None:
    record = DeviceRecord("main", device, "ready", release=release, capability={"tier": "head"})
    registered_devices.record(db, [record])


def test_accuracies_before_and_after_a_release_are_those_of_the_same_devices(db: Database) -> None:
    released.record_release(db, ReleaseRecord("main", 2, "toy", 1, "fedrep", "0" * 64, 100))
    rollouts.begin(db, "main", 2, previous=1)
    head(db, "pi-0", "r", 1.0, before=1.0)
    for number in range(1, 7):
        head(db, f"pi-{number}", "r", 0.9)
    head(db, "pi-6", "refit", 0.93)
    page = releases.read(db, "main")
    found = page.releases[2].reports
    assert (found.measured, found.gain.n) == (7, 1)  # the newest report of each device
    assert (found.gain.before, found.gain.after) == (1.0, 1.0)
    assert found.after == pytest.approx((1 + 5 * 0.9 + 0.93) / 7)
    shown = releases.current(page)
    assert (
        "100.0 → 100.0 " in shown and "(n = 1)" in shown and "(n = 7)" in shown and "100.0 → 9" not in shown
    )


def test_the_mean_of_a_release_holds_only_the_devices_that_serve_it(db: Database) -> None:
    released.record_release(db, ReleaseRecord("main", 2, "toy", 1, "fedrep", "0" * 64, 100))
    rollouts.begin(db, "main", 2, previous=1)
    for number in range(5):
        head(db, f"pi-{number}", "r", 0.9 if number < 2 else 0.1, before=0.5)
    before = accuracy.head_reports(db, "main")[2]
    assert (before.measured, before.gain.n) == (5, 5)
    serves(db, "pi-2", 1)  # it went back
    registered_devices.remove(db, "main", "pi-3", "decommissioned")
    registered_devices.quarantine(db, "main", "pi-4", "norm")
    row = releases.read(db, "main").releases[2]
    assert (row.running, row.reports.measured, row.reports.after) == (2, 2, 0.9)
    assert row.reports.gain is not None and row.reports.gain.n == 3  # pi-2 measured both, too
    shown = releases.current(releases.read(db, "main"))
    assert "2 of 3" in shown and "90.0 <" in shown and "(n = 2)" in shown
    page = device.read(db, "main", "pi-0")
    assert page is not None and "release 2: 90.0 % (n = 2)" in device.comparison(page)


def test_a_page_and_release_compare_give_the_same_change(db: Database) -> None:
    for release in (1, 2):
        released.record_release(db, ReleaseRecord("main", release, "toy", 1, "fedrep", "0" * 64, 100))
    rollouts.begin(db, "main", 2, previous=1)
    for number, (old, new) in enumerate(((0.9, 0.8), (0.5, 0.8), (0.6, 0.9))):
        head(db, f"pi-{number}", "r", new, before=old)
    shown, compared = accuracy.change(db, "main", 2), compare.releases(db, "main").found
    assert shown.found is not None and compared is not None
    assert (shown.other, shown.found.n) == (1, compared.n) == (1, 3)
    assert (shown.found.mean, shown.found.low, shown.found.high) == pytest.approx(
        (compared.mean, compared.low, compared.high)
    )


def test_only_devices_whose_reports_count_are_compared(db: Database) -> None:
    for release in (1, 2):
        released.record_release(db, ReleaseRecord("main", release, "toy", 1, "fedrep", "0" * 64, 100))
    rollouts.begin(db, "main", 2, previous=1)
    old = {"metrics": {}, "before": 0.5, "release": 1}
    for number in range(6):
        name = f"pi-{number}"
        head(db, name, "r", 0.9 if number < 3 else 0.0, before=0.5)
        earlier = ReportRecord("main", name, "old", "toy", 1, "head", 9, after=0.6, **old)
        assert registered_reports.accept(db, earlier)
    registered_devices.quarantine(db, "main", "pi-3", "norm")
    registered_devices.set_revoked(db, "main", ["pi-4"])
    registered_devices.remove(db, "main", "pi-5", "decommissioned")
    shown, compared = accuracy.change(db, "main", 2).found, compare.releases(db, "main")
    assert shown is not None and compared.found is not None and compared.same_images
    assert (shown.n, shown.mean) == (compared.found.n, pytest.approx(compared.found.mean)) == (3, 0.4)
    assert sorted(compared.before) == ["pi-0", "pi-1", "pi-2"]
    swapped = compare.releases(db, "main", 2, 1)
    assert not swapped.same_images and swapped.found is not None and swapped.found.n == 3


def test_the_bar_of_a_release_is_its_share_of_all_head_only_devices(db: Database) -> None:
    released.record_release(db, ReleaseRecord("main", 2, "toy", 1, "fedrep", "0" * 64, 100))
    able = {"tier": "head"}
    rows = [DeviceRecord("main", f"pi-{n}", "ready", release=2 * (n < 3), capability=able) for n in range(12)]
    registered_devices.record(db, rows)
    assert (releases.read(db, "main").releases[2].running, releases.read(db, "main").releases[2].part) == (
        3,
        0.25,
    )


def rounds_of(db: Database, clients: dict[int, int], mean: float = 0.9) -> None:
    for round, n in clients.items():
        found = {BEFORE: 1.0 if n < 5 else mean} if n else {}
        runs.record_round(
            db, RoundRecord("toy", round, 27, n, 1.0, metrics=found, clients=dict.fromkeys(found, n))
        )


def test_a_mean_over_few_clients_is_no_point_of_the_line(db: Database) -> None:
    rounds_of(db, {1: 27, 2: 25, 3: 2})
    page = run.read(db, "main")
    chart = run.curves(page) if page else None
    assert chart is not None
    line, apart = chart.options["series"]
    assert line["data"] == [90.0, 90.0, None] and apart["data"] == [None, None, 100.0]
    assert chart.options["xAxis"]["data"] == ["1\nn = 27", "2\nn = 25", "3\nn = 2"]


def test_a_point_says_its_own_number_of_clients_and_the_axis_ends_at_100() -> None:
    personal = charts.ChartCurve("personal", {1: 0.9, 2: 1.0}, {1: 0.02, 2: 0.03}, clients={1: 3, 2: 7})
    chart = charts.lines([personal, charts.ChartCurve("global", {1: 0.8}, clients={1: 27})], "round")
    assert chart is not None
    assert '{"personal": [3, 7], "global": [27, null]}' in chart.options["tooltip"][":formatter"]
    assert (chart.options["yAxis"]["min"], chart.options["yAxis"]["max"]) == (80, 100)
    same = charts.lines([charts.ChartCurve("after", {1: 1.0, 2: 1.0})], "report")
    assert same is not None and (same.options["yAxis"]["min"], same.options["yAxis"]["max"]) == (95, 100)


def test_equal_ends_have_one_label_and_places_have_their_names() -> None:
    equal = [charts.ChartCurve("after", {1: 0.8, 2: 0.9}), charts.ChartCurve("before", {1: 0.7, 2: 0.9})]
    chart = charts.lines(equal, "", names={1: "release 1", 2: "release 2"})
    assert chart is not None and chart.options["xAxis"]["data"] == ["release 1", "release 2"]
    assert [one["endLabel"]["show"] for one in chart.options["series"]] == [True, False]


@pytest.mark.parametrize(
    ("after", "images", "samples", "drift", "expected"),
    [
        (0.889, 27, 73, 0.0, "3 of 27 samples wrong; may be chance."),
        (0.6, 27, 73, 0.0, "11 of 27 samples wrong; more than chance. No likely cause"),
        (0.6, 27, 40, 0.0, "more than chance. Likely cause: few samples"),
        (0.6, 27, 40, 1.3, "Likely cause: its samples have changed"),
    ],
)
def test_a_device_is_compared_with_the_others_on_its_release(
    db: Database, after: float, images: int, samples: int, drift: float, expected: str
) -> None:
    for number, has in enumerate((samples, 90, 101, 120)):
        able = {"tier": "head", "samples": has, "samples_per_class": [has, 0], "drift": drift}
        registered_devices.record(
            db, [DeviceRecord("main", f"pi-{number}", "ready", release=2, capability=able)]
        )
        own = after if number == 0 else 0.95
        values = {metrics.TEST_SAMPLES: images}
        registered_reports.accept(
            db, ReportRecord("main", f"pi-{number}", "r", "toy", 1, "head", has, values, None, own, 2)
        )
    page = device.read(db, "main", "pi-0")
    assert page is not None and page.median_samples == 90
    shown = device.comparison(page)
    mean = (after + 3 * 0.95) / 4
    assert f"{100 * after:.1f} % of 27 test samples (one sample is 3.7 points)" in shown and expected in shown
    assert f"release 2: {100 * mean:.1f} % (n = 4)" in shown and "in 1 of 2 classes" in shown
    best = device.read(db, "main", "pi-1")
    assert best is not None and "cause" not in device.comparison(best)


def test_a_run_that_ended_before_a_round_waits_for_none(db: Database) -> None:
    page = run.read(db, "main")
    assert page is not None and "appear here as soon as" in run.summary(page)
    runs.end(db, "toy", "failed", "no device")
    page = run.read(db, "main")
    assert page is not None and "ended before its first round" in run.summary(page)


def test_the_headline_is_the_newest_evaluated_round_with_its_clients(db: Database) -> None:
    rounds_of(db, {1: 27, 2: 26, 3: 0})
    page = run.read(db, "main")
    assert page is not None
    shown = run.summary(page)
    assert '90.0<div class="quiet">n = 26, round 2</div>' in shown


def test_the_best_round_has_enough_clients() -> None:
    name = metrics.PERSONAL_VALIDATION_BEFORE
    found = [{name: summary(mean, n)} for mean, n in ((0.8, 20), (0.9, 12), (1.0, 2))]
    assert summaries.best_by_validation(found) == 1
    assert summaries.best_by_validation([{}, found[2]]) == 1 and summaries.best_by_validation([{}]) is None


def test_a_device_that_was_requested_again_counts_once(db: Database) -> None:
    names = [f"pi-{number}" for number in range(6)]
    for attempt in range(3):
        id = f"t-1-{attempt}"
        runs.add_requests(db, [RequestRecord("main", name, id, "toy", 1, "train") for name in names])
        if attempt == 2:
            runs.settle_requests(db, "main", id, "succeeded", device="pi-0")
        runs.settle_requests(db, "main", id, "timed_out")
    rounds_of(db, {1: 6})
    runs.add_requests(db, [RequestRecord("main", name, "t-2-0", "toy", 2, "train") for name in names])
    runs.settle_requests(db, "main", "t-2-0", "timed_out")
    runs.add_requests(db, [RequestRecord("main", name, "t-2-1", "toy", 2, "train") for name in names])
    page = run.read(db, "main")
    assert page is not None
    assert page.rounds[0].dropped == {"timed_out": 5}
    assert page.current == {"queued": 6} and "0 of 6" in run.summary(page)


def test_metrics_for_prometheus_are_of_the_last_evaluated_round_with_their_clients(db: Database) -> None:
    rounds_of(db, {1: 27, 2: 0})
    families = {f.name: f for f in text_string_to_metric_families(prometheus.text(db, "main").decode())}
    (accuracy,), (clients,) = (
        families[name].samples for name in ("edge_fl_accuracy", "edge_fl_accuracy_clients")
    )
    assert (accuracy.value, clients.value, clients.labels["metric"]) == (0.9, 27, BEFORE)


def samples(db: Database, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by its labels, the last name first, without the fleet's."""
    families = {f.name: f for f in text_string_to_metric_families(prometheus.text(db, "main").decode())}
    return {
        tuple(one.labels[label] for label in sorted(one.labels, reverse=True) if label != "fleet"): one.value
        for one in families[name].samples
    }


def test_metrics_for_prometheus_name_what_is_in_service_and_keep_both_kinds_of_roll_outs_apart(
    db: Database,
) -> None:
    assert set(samples(db, "edge_fl_release").values()) == {0}
    for number in (1, 2, 3):
        released.record_release(db, ReleaseRecord("main", number, "toy", 1, "fedrep", "0" * 64, 100))
        record = rollouts.get(db, rollouts.begin(db, "main", number, previous=number - 1))
        assert record is not None
        rollouts.advance(db, record, state="completed" if number < 3 else "aborted")
    rollouts.begin(db, "main", 1, subject="agent")
    assert samples(db, "edge_fl_release") == {
        ("extractor", "in_service"): 2,
        ("extractor", "newest"): 3,
        ("agent", "in_service"): 0,
        ("agent", "newest"): 1,
    }
    assert samples(db, "edge_fl_rollouts") == {
        ("extractor", "completed"): 2,
        ("extractor", "aborted"): 1,
        ("extractor", "running"): 0,
        ("extractor", "paused"): 0,
        ("agent", "running"): 1,
        ("agent", "paused"): 0,
    }


def test_metrics_for_prometheus_have_every_mean_of_the_pages_with_its_n(db: Database) -> None:
    released.record_release(db, ReleaseRecord("main", 2, "toy", 1, "fedrep", "0" * 64, 100))
    for number in range(4):
        head(db, f"pi-{number}", "r", 0.7 + number / 10, before=0.5 if number else None)
        found = {metrics.FLEET: 0.6} if number < 3 else {}
        after = 0.8 + number / 100
        report = ReportRecord("main", f"pi-{number}", "refit", "toy", 1, "head", 9, found, None, after, 2)
        registered_reports.accept(db, report)
        personal = {metrics.PERSONAL_AFTER: 0.9, metrics.TEST_SAMPLES: 30}
        report = ReportRecord("main", f"full-{number}", "p", "toy", 9, "personal", 9, personal)
        registered_reports.accept(db, report)
    rounds_of(db, {1: 27})
    one = releases.read(db, "main").releases[2].reports
    assert one.gain is not None and one.fleet_measured == 3
    shown = {
        ("2", "served"): (one.after, one.measured),
        ("2", "fleets_head"): (one.fleet, one.fleet_measured),
        ("2", "before"): (one.gain.before, one.gain.n),
        ("2", "after"): (one.gain.after, one.gain.n),
    }
    values, counts = samples(db, "edge_fl_release_accuracy"), samples(db, "edge_fl_release_accuracy_devices")
    assert {key: (value, counts[key]) for key, value in values.items()} == {
        key: (pytest.approx(mean), n) for key, (mean, n) in shown.items()
    }
    assert samples(db, "edge_fl_accuracy") == {(BEFORE,): 0.9, (metrics.PERSONAL_AFTER,): pytest.approx(0.9)}
    assert samples(db, "edge_fl_accuracy_clients") == {(BEFORE,): 27, (metrics.PERSONAL_AFTER,): 4}
