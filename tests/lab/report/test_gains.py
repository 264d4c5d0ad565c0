"""Headlines and gains: of the same clients, full and head-only devices apart, of the newest evaluated line, never of a few clients."""

import pytest

from edge_fl.metrics import FLEET, GLOBAL_TEST, LOCAL_ONLY, PERSONAL_AFTER, PERSONAL_BEFORE, TEST_SAMPLES
from edge_fl_lab.report import facts
from edge_fl_server.runs.round_metrics import RoundLine

DEVICES = [{"device": f"h{n}", "tier": "head", "samples": "30"} for n in range(3)]
DEVICES += [{"device": f"f{n}", "tier": "full", "samples": "50"} for n in range(2)]


def line(clients: dict[str, dict[str, float]], number: int = 1, final: bool = True) -> RoundLine:
    return RoundLine(round=number, line=number, final=final, clients=clients)


def test_full_and_head_only_devices_are_apart_and_each_gain_is_paired() -> None:
    found = {
        "h0": {PERSONAL_BEFORE: 0.5, PERSONAL_AFTER: 0.6, TEST_SAMPLES: 10.0},
        "h1": {PERSONAL_BEFORE: 0.6, PERSONAL_AFTER: 0.8},
        "h2": {PERSONAL_AFTER: 1.0},  # new: it has no earlier head
        "f0": {GLOBAL_TEST: 0.7, PERSONAL_AFTER: 0.9},
        "f1": {GLOBAL_TEST: 0.7, PERSONAL_AFTER: 0.7},
    }
    full, head = facts.groups_of([line(found)], DEVICES)
    assert (full.name, full.n.value, full.mean.value) == ("full devices", 2, pytest.approx(0.8))
    assert (head.name, head.n.value, head.mean.value) == ("head-only devices", 3, pytest.approx(0.8))
    (gain,) = head.gains
    assert gain.over == facts.PREVIOUS_HEADS and gain.n.value == 2
    assert [gain.baseline.value, gain.accuracy.value] == pytest.approx(
        [0.55, 0.7]
    )  # of these two, not of three
    assert gain.difference.value == pytest.approx(0.15)
    assert head.worst[0] == "h0" and head.devices["h0"].test_samples.value == 10
    assert head.devices["h0"].samples == 30
    assert facts.verdict("repper", "completed", 3, (full, head)) == (
        "repper reaches a mean accuracy of 80.0 % over 2 full devices, not clearly different from the shared model"
        " (+10.0 points, 95 % CI -117.1 to +137.1, n = 2), and a mean accuracy of 80.0 % over 3 head-only devices, not clearly"
        " different from the heads on the previous release (+15.0 points, 95 % CI -48.5 to +78.5, n = 2)."
    )


def test_the_headline_is_of_the_newest_evaluated_line_and_not_of_a_few_clients() -> None:
    many = {f"c{n}": {PERSONAL_BEFORE: 0.9} for n in range(10)}
    (group,) = facts.groups_of([line(many, 1, False), line({}, 2, False)], [])
    assert (group.round, group.metric, group.n.value) == (1, PERSONAL_BEFORE, 10)
    many["c0"] |= {PERSONAL_AFTER: 1.0}
    (group,) = facts.groups_of([line(many, 3)], [])
    assert (group.metric, group.n.value, group.mean.value) == (PERSONAL_BEFORE, 10, pytest.approx(0.9))


def test_a_device_has_the_interval_of_its_few_test_samples_and_the_fleets_head_on_the_same() -> None:
    found = {
        "h0": {PERSONAL_AFTER: 0.83, TEST_SAMPLES: 60.0, FLEET: 0.76},
        "h1": {PERSONAL_AFTER: 0.83, TEST_SAMPLES: 5.0},
        "h2": {PERSONAL_AFTER: 0.83, TEST_SAMPLES: 5000.0, FLEET: 0.83},
    }
    (group,) = facts.groups_of([line(found)], DEVICES)
    devices = group.devices
    assert [devices[name].interval for name in found] == ["74 to 90 %", "", ""]
    fleets = [devices[name].fleet for name in found]
    assert [figure and figure.value for figure in fleets] == [0.76, None, 0.83]
    (gain,) = (gain for gain in group.gains if gain.over == "the fleet's head alone")
    assert gain.n.value == 2 and gain.difference.value == pytest.approx(0.035)


def test_training_alone_is_the_first_baseline_and_equal_models_are_no_gain() -> None:
    found = {
        f"c{n}": {
            LOCAL_ONLY: 0.6 + n / 100,
            GLOBAL_TEST: 0.9,
            PERSONAL_BEFORE: 0.8,
            FLEET: 0.7,
            PERSONAL_AFTER: 0.8,
        }
        for n in range(4)
    }
    groups = facts.groups_of([line(found)], [])
    assert [gain.over for gain in groups[0].gains] == list(facts.BASELINES.values())
    text = facts.verdict("fedrep", "completed", 3, groups)
    assert (
        "+18.5 points compared with training on the client's own data alone (95 % CI +16.4 to +20.6, n = 4)"
        in text
    )
    same = {client: {PERSONAL_BEFORE: 0.8, PERSONAL_AFTER: 0.8} for client in found}
    assert facts.verdict("fedrep", "completed", 3, facts.groups_of([line(same)], [])) == (
        f"fedrep reaches a mean accuracy of 80.0 % over 4 clients. {facts.NO_BASELINE}"
    )


def test_a_run_without_a_baseline_says_so_and_names_its_lowest_client() -> None:
    found = {"c0": {PERSONAL_AFTER: 0.9, TEST_SAMPLES: 10}, "c1": {PERSONAL_AFTER: 0.7, TEST_SAMPLES: 20}}
    groups = facts.groups_of([line(found)], [])
    assert facts.verdict("repper", "completed", 3, groups) == (
        f"repper reaches a mean accuracy of 80.0 % over 2 clients. {facts.NO_BASELINE}"
    )
    assert facts.lowest(groups) == "Lowest: c1, 70.0 % of 20 test samples."
    assert facts.lowest([]) == ""


def test_a_verdict_says_how_a_run_ended() -> None:
    assert facts.verdict("fedrep", "failed", 2, ()) == "Nothing was measured. The run failed after round 2."
    (group,) = facts.groups_of([line({"c0": {GLOBAL_TEST: 0.5, PERSONAL_AFTER: 0.6}})], [])
    assert facts.verdict("fedrep", "stopped", 4, [group]) == (
        "fedrep reaches a mean accuracy of 60.0 % over 1 client, +10.0 points compared with the shared model (n = 1)."
        " The run was stopped after round 4."
    )
