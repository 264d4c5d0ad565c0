"""One run against a fleet: from a recipe to results, in one named end state, with nothing left on the broker that keeps devices at work."""

import csv
import json
import re
import threading
from dataclasses import replace as changed

import numpy as np
import pytest
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.blob import describe
from edge_fl.data.partition import DataConfig
from edge_fl.errors import ConfigError, ConnectError, InputError
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.wire import tensors
from edge_fl.wire.messages import Assignment, ServerState, decode
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import connected
from edge_fl_server.orchestrate import execution
from edge_fl_server.orchestrate.releases import is_due
from edge_fl_server.recipes.recipe import ReleaseConfig
from edge_fl_server.registry import Database, registered_devices, registered_reports, rollouts, runs
from edge_fl_server.registry.tables import ReportRecord
from edge_fl_server.release.rollout.stages import ALL_AT_ONCE, CAREFUL, CAREFUL_FROM
from edge_fl_server.runs import checkpoint, round_metrics
from edge_fl_server.runs.results import Results, list_runs
from tests.rejections import rejections_of
from tests.server.orchestrate.toy_runs import finished, method, refusing, with_recipe


def test_a_run_trains_releases_and_says_what_every_device_reported(stage, run_request, tmp_path):
    stage.device("d1"), stage.device("d2")
    heads = [stage.head("h1", tmp_path, after=1.0), stage.head("h2", tmp_path, after=0.5)]
    run_request = with_recipe(run_request, release=ReleaseConfig(every=1, wait_s=20.0))
    path = finished(run_request)
    assert Results.open(path).state().state == "completed"

    assert [head.served for head in heads] == [[1, 2], [1, 2]]
    *records, final = round_metrics.lines(path / round_metrics.FILE)
    assert final.final and set(final.clients) == {"d1", "d2", "h1", "h2"}
    assert [(record.round, record.selected, record.responded) for record in records] == [
        (1, ("d1", "d2"), ("d1", "d2")),
        (2, ("d1", "d2"), ("d1", "d2")),
    ]

    summary = json.loads((path / "metrics_summary.json").read_text())
    assert summary["source"] == "fleet"
    assert summary["personal.test_acc.after"]["clients"] == 4
    assert summary["head.personal.test_acc.after"]["mean"] == 0.75
    assert summary["head.personal.test_acc.before"]["mean"] == 0.375
    assert summary["full.personal.test_acc.after"]["clients"] == 2
    assert set(summary["global.test_acc"]) == {"mean", "weighted_mean", "std", "bottom_decile", "clients"}

    rows = {row["device"]: row for row in csv.DictReader((path / "devices.csv").read_text().splitlines())}
    assert [rows[id]["tier"] for id in ("d1", "h1")] == ["full", "head"]
    assert rows["h1"]["head"] == "svm"
    assert (rows["h1"]["before"], rows["h1"]["after"], rows["h1"]["release"]) == ("0.5", "1.0", "2")
    assert int(rows["h1"]["bytes_down"]) == 200
    of_devices = [sum(int(row[name]) for row in rows.values()) for name in ("bytes_down", "bytes_up")]
    assert sorted(file.name for file in (path / "artefacts").iterdir()) == [
        "release-1.json",
        "release-2.json",
    ]

    db = Database.open(run_request.registry)
    (known,) = runs.listed(db, "main")
    assert (known.run, known.state, known.folder) == (path.name, "completed", str(path))
    assert [(done.round, done.selected, done.responded) for done in runs.rounds_of(db, path.name)] == [
        (1, 2, 2),
        (2, 2, 2),
    ]
    late = ReportRecord("main", "h1", "refit", path.name, 2, "head", 6, bytes_down=7, bytes_up=7)
    registered_reports.accept(db, late)  # after the end of the run
    traffic = runs.traffic(db, known)
    assert [traffic.down, traffic.up] == of_devices and min(of_devices) > 0
    assert {given.state for given in runs.requests_of(db, path.name)} == {"succeeded"}
    assert {one.device: (one.before, one.after) for one in registered_reports.of_release(db, "main", 2)}[
        "h1"
    ] == (
        0.5,
        1.0,
    )
    assert [release.round for release in rollouts.releases_of(db, "main")] == [2, 1]
    assert [
        (device.device, device.capability["tier"]) for device in registered_devices.listed(db, "main")
    ] == [
        ("d1", "full"),
        ("d2", "full"),
        ("h1", "head"),
        ("h2", "head"),
    ]

    kept = stage.retained()
    assert not decode(kept["srv/state"], ServerState).online
    assert not [
        topic
        for topic in kept
        if topic.startswith("round/") or topic.endswith(("d1/dn/assignment", "d2/dn/assignment"))
    ]
    assert decode(kept["d/h1/dn/assignment"], Assignment).release == 2
    needed = json.loads((path / "artefacts" / "release-2.json").read_text())["extractor"]["sha256"]
    chunks = [payload for topic, payload in kept.items() if topic.startswith(f"art/{needed}/")]
    assert chunks
    assert not [chunk for chunk in chunks if b".py" in chunk or str(execution.__file__).encode() in chunk]


def test_a_larger_fleet_gets_its_first_release_at_once_and_the_next_in_stages(stage, run_request, tmp_path):
    stage.device("d1"), stage.device("d2")
    heads = [stage.head(f"h{number}", tmp_path) for number in range(CAREFUL_FROM)]
    website = str(tmp_path / "web")
    run_request = with_recipe(
        run_request, release=ReleaseConfig(every=1, heads=CAREFUL_FROM, wait_s=30.0, website=website)
    )
    finished(run_request)
    assert {place.name for place in (tmp_path / "web" / "targets").iterdir()} == {"1", "2"}
    assert [head.served for head in heads] == [[1, 2]] * CAREFUL_FROM
    second, first = rollouts.listed(Database.open(run_request.registry), "main")
    assert (first.plan["stages"], first.state) == (list(ALL_AT_ONCE), "completed")
    smallest, *larger = second.plan["stages"]
    assert CAREFUL[0] < smallest < CAREFUL[1]  # raised to at least three devices
    assert (larger, second.state, second.stage) == (list(CAREFUL[1:]), "completed", 2)


def test_a_device_that_sends_outliers_changes_nothing_and_is_quarantined_by_name(stage, run_request):
    def oversized(mode, report, payload):
        if mode != "train":
            return [(report, payload)]
        parts = {name: {key: 20 * a for key, a in p.items()} for name, p in tensors.unpack(payload).items()}
        payload = tensors.pack(parts)
        return [(replace(report, blob=describe(payload, 1024)), payload)]

    for id in ("d1", "d2", "d3", "d4"):
        stage.device(id)
    stage.device("liar", tamper=oversized)
    path = finished(
        with_recipe(run_request, rounds=5, cohort=replace(run_request.recipe.cohort, min_devices=4))
    )
    *records, _ = round_metrics.lines(path / round_metrics.FILE)
    assert [("liar" in record.selected) for record in records] == [True] * 3 + [False] * 2
    assert [record.rejected.get("outlier", 0) for record in records] == [1, 1, 1, 0, 0]
    known = {
        device.device: device
        for device in registered_devices.listed(Database.open(run_request.registry), "main")
    }
    assert re.search(r"3 reports rejected.*(change of|deviates) .* times", known["liar"].quarantine)
    assert known["liar"].outlier_score > 1
    assert not any(device.quarantine or device.outlier_score for id, device in known.items() if id != "liar")
    before = steps.start(build_method(stage.spec("fedavg")))["extractor"]
    after = checkpoint.load(Results.open(path).checkpoints).shared["extractor"]
    grown = [
        name
        for name, t in after.items()
        if t.is_floating_point() and t.norm() > 5 * (1 + before[name].norm())
    ]
    assert not grown


def test_a_weight_that_a_device_states_itself_is_bounded_by_the_cohorts(stage, run_request, caplog):
    def heavy(mode, report, payload):
        if mode != "train":
            return [(report, payload)]
        parts = tensors.unpack(payload)
        parts["fisher"] = {"trace": parts["fisher"]["trace"] * 1e9}
        payload = tensors.pack(parts)
        return [(replace(report, blob=describe(payload, 1024)), payload)]

    for id in ("d1", "d2", "d3"):
        stage.device(id)
    stage.device("liar", tamper=heavy)
    method = replace(run_request.recipe.method, name="fedas")
    cohort = replace(run_request.recipe.cohort, min_devices=4)
    with caplog.at_level("WARNING"):
        finished(with_recipe(run_request, rounds=1, method=method, cohort=cohort))
    bounded = [r for r in caplog.records if "max_weight" in r.getMessage()]
    assert [record.device for record in bounded] == ["liar"]


def test_a_head_that_comes_late_gets_the_current_release_and_counts(stage, run_request, tmp_path):
    stage.device("d1"), stage.device("d2")
    run_request = with_recipe(run_request, rounds=1, release=ReleaseConfig(heads=1, wait_s=60.0))

    def arrive():
        assert stage.eventually(lambda: "tuf/timestamp.json" in stage.retained("tuf/#"))
        stage.head("late", tmp_path)

    arrival = threading.Thread(target=arrive)
    arrival.start()
    path = finished(run_request)
    arrival.join()
    assert stage.heads[0].served == [1]
    assert Results.open(path).summary()["head." + metrics.PERSONAL_AFTER].clients == 1


def test_more_classes_than_a_device_accepts_are_rejected_before_the_run(run_request, tmp_path):
    labels = np.arange(1025)
    np.savez(tmp_path / "toy.npz", x=np.zeros((1025, 1, 4, 4), np.uint8), y=labels)
    with pytest.raises(
        ConfigError, match=r"'toy': 1025 classes, expected at most 1024 .*; no run was started"
    ):
        finished(run_request)
    assert not run_request.runs.exists()


class Viewer:
    """A tracker that remembers what it was told."""

    def __init__(self, folder, after):
        self.after, self.steps, self.open = after, [], True

    def note(self, step, scalars):
        self.steps.append((step, "round/seconds" in scalars))

    def close(self):
        self.open = False


def test_a_viewer_has_every_round_and_the_closing_step_and_hears_where_a_resume_begins(run_request):
    opened = []
    viewer = lambda folder, after: opened.append(Viewer(folder, after)) or opened[-1]  # noqa: E731
    run_request = changed(with_recipe(run_request, source="simulated"), track={"viewer": viewer})
    path = finished(run_request)
    (path / "checkpoints" / "round-00002.safetensors").unlink()
    finished(changed(run_request, resume=path))
    assert [(one.after, one.open) for one in opened] == [(None, False), (1, False)]
    assert [one.steps for one in opened] == [[(1, True), (2, True), (2, False)], [(2, True), (2, False)]]


@pytest.mark.parametrize("source", ["simulated", "hybrid"])
def test_simulated_clients_train_here_and_heads_are_served_all_the_same(stage, run_request, tmp_path, source):
    stage.device("d1"), stage.device("d2"), stage.head("h1", tmp_path)
    path = finished(with_recipe(run_request, source=source, rounds=1))
    (record,) = Results.open(path).rounds()
    rows = {
        row["device"]: row["tier"] for row in csv.DictReader((path / "devices.csv").read_text().splitlines())
    }
    assert len(record.responded) == {"simulated": 3, "hybrid": 5}[source]
    assert rows == {
        "c000": "simulated",
        "c001": "simulated",
        "c002": "simulated",
        "d1": "full",
        "d2": "full",
        "h1": "head",
    }
    assert Results.open(path).summary()["head." + metrics.PERSONAL_AFTER].clients == 1
    assert len(Results.open(path).manifest().data_hash) == 64


def test_a_method_that_shares_no_extractor_trains_and_releases_nothing(stage, run_request, tmp_path, capsys):
    stage.device("d1"), stage.device("d2"), stage.head("h1", tmp_path)
    path = finished(with_recipe(run_request, method=method("local"), rounds=1))
    assert "shares no extractor" in capsys.readouterr().err
    assert not [topic for topic in stage.retained() if topic.startswith(("tuf/", "art/"))]
    assert Results.open(path).summary()["full." + metrics.PERSONAL_AFTER].clients == 2


def test_release_numbers_go_on_from_run_to_run(stage, run_request, tmp_path):
    stage.device("d1"), stage.device("d2")
    head = stage.head("h1", tmp_path)
    for _ in range(2):
        finished(with_recipe(run_request, rounds=1))
    assert head.served == [1, 2]


def test_wrong_input_is_refused_before_anything_connects(run_request):
    def never(*arguments, **keywords):
        raise AssertionError("connected")

    wrong = with_recipe(run_request, data=DataConfig("nosuch", "nowhere"))
    with pytest.raises(InputError, match="nosuch"):
        finished(changed(wrong, access=changed(wrong.access, connect=never)))
    assert not run_request.runs.exists()


def test_a_second_run_is_refused_while_one_is_online(stage, run_request):
    with (
        Journal() as journal,
        connected(ServerConnection(stage.connect, journal)),
        pytest.raises(ConnectError, match="--takeover"),
    ):
        finished(
            changed(run_request, access=changed(run_request.access, adopt=True))
        )  # it has a registry of its own
    assert not run_request.runs.exists()


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [1, 5])])
def test_releases_come_after_the_first_round_and_every_so_often(every, due):
    assert [round for round in range(1, 6) if is_due(round, every)] == due


def test_a_run_without_any_accuracy_of_a_full_device_gives_the_devices_reason(stage, run_request):
    for id in ("d1", "d2"):
        stage.device(id, tamper=refusing("evaluate", "personalise"))
    path = finished(with_recipe(run_request, evaluate_every=1))
    state = Results.open(path).state()
    assert state.state == "completed"
    assert state.reason == (
        "no full device could evaluate: rejected (d1, d2); no full device could personalise: rejected (d1, d2)"
    )
    (listed,) = list_runs(run_request.runs)
    assert listed.reason == state.reason
    (known,) = runs.listed(Database.open(run_request.registry), "main")
    assert known.reason == state.reason


def test_a_run_in_which_one_full_device_could_measure_has_no_such_reason(stage, run_request):
    stage.device("d1"), stage.device("d2", tamper=refusing("evaluate", "personalise"))
    state = Results.open(finished(run_request)).state()
    assert (state.state, state.reason) == ("completed", "")


def test_an_impossible_accuracy_of_a_head_only_device_does_not_reach_the_results(
    stage, run_request, tmp_path
):
    stage.device("d1"), stage.device("d2")
    stage.head("h1", tmp_path, after=1e308), stage.head("h2", tmp_path, after=0.5)
    path = finished(with_recipe(run_request, release=ReleaseConfig(every=1, wait_s=1.0)))
    assert Results.open(path).summary()["head.personal.test_acc.after"].clients == 1
    rejected = rejections_of(Database.open(run_request.registry), "main", device="h1")
    assert {one.reason for one in rejected} == {"metrics"}
