"""Asynchronous aggregation: a round ends when its buffer is full, and what comes later counts in the round in which it comes, but less."""

import pytest

from edge_fl.errors import ConfigError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.staleness import moved
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl_server.orchestrate.execution import prepare
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, with_settings
from edge_fl_server.registry import registered_reports, runs
from edge_fl_server.runs import checkpoint
from edge_fl_server.training import cohorts, rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.unreliable import DelayedClients

IDS = tuple(f"c{number}" for number in range(8))


def delayed(stage, method, size: int = 3, most: int = 10, ids=IDS) -> DelayedClients:
    clients = SequentialClients({id: stage.client(id) for id in ids}, method)
    return DelayedClients(clients, method, 1, buffer_size=size, max_staleness=most)


def plan(count: int, size: int = 3, most: int = 10) -> Plan:
    return Plan(count, seed=1, cohort=CohortConfig(buffer_size=size, max_staleness=most))


def test_a_round_takes_the_first_of_those_at_work_and_the_others_stay(stage):
    method = build_method(stage.spec("fedavg"))
    found = list(rounds.run(method, delayed(stage, method), plan(8)))
    assert all(len(result.responded) == 3 for result in found)
    assert all(result.selected == IDS for result in found)  # with participation 1 everybody is always at work
    assert found[0].staleness == {}
    assert all(0 < max(result.staleness.values()) < result.round for result in found[2:])
    again = list(rounds.run(method, delayed(stage, method), plan(8)))
    assert [result.responded for result in again] == [result.responded for result in found]
    assert same(again[-1].shared, found[-1].shared)


def test_a_buffer_for_everybody_is_the_synchronous_run(stage):
    method = build_method(stage.spec("fedrep"))
    clients = SequentialClients({id: stage.client(id) for id in IDS}, method)
    *_, expected = rounds.run(method, clients, Plan(3, seed=1))
    *_, found = rounds.run(method, delayed(stage, method, len(IDS)), plan(3, len(IDS)))
    assert same(found.shared, expected.shared)


def test_what_is_too_late_is_given_up_and_its_client_asked_anew(stage):
    method = build_method(stage.spec("fedavg"))
    strict = [result.staleness for result in rounds.run(method, delayed(stage, method, 2, 1), plan(12, 2, 1))]
    patient = [result.staleness for result in rounds.run(method, delayed(stage, method, 2), plan(12, 2))]
    assert max(late for found in strict for late in found.values()) == 1
    assert max(late for found in patient for late in found.values()) > 1


def test_evaluating_in_between_interrupts_nobody(stage):
    method = build_method(stage.spec("fedavg"))
    fleet = delayed(stage, method)
    for result in rounds.run(method, fleet, rounds.Plan(2, 1, plan(2).cohort, evaluate_every=1)):
        assert set(result.metrics) == set(result.selected) - set(fleet.at_work())
    _, closing = rounds.final_personalisation(method, fleet, result.shared, 2)
    assert set(closing) == set(IDS)


@pytest.mark.parametrize("name", ["fedrep", "fedavg"])
def test_a_resumed_run_goes_on_with_those_at_work(stage, tmp_path, name):
    method = build_method(stage.spec(name))
    fleet = delayed(stage, method)
    for result in rounds.run(method, fleet, plan(5)):
        if result.round == 3:
            checkpoint.save(tmp_path, 3, plan(5), result.shared, fleet.personal_state())
            assert fleet.at_work()
    expected = rounds.final_personalisation(method, fleet, result.shared, 5)
    saved = checkpoint.load(tmp_path)
    fleet = delayed(stage, method)
    fleet.restore(iter(saved.own.items()))
    *_, result = rounds.run(method, fleet, saved.plan, saved.shared, first=4)
    found = rounds.final_personalisation(method, fleet, result.shared, 5)
    assert same(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["method.name=fedproto"], "FedProto"),
        (["method.name=local"], "Local"),
        (["source=hybrid"], "source hybrid"),
    ],
)
def test_what_cannot_be_joined_late_is_refused_by_name(settings, said):
    recipe = with_settings(Recipe(source="fleet"), ["cohort.buffer_size=3", *settings])
    with pytest.raises(ConfigError, match=f"buffer_size = 3: .*{said}.*nothing was changed"):
        prepare(recipe)


def test_only_as_many_are_drawn_as_are_not_at_work():
    half, clients = CohortConfig(participation=0.5), [f"c{number}" for number in range(10)]
    drawn = cohorts.draw(clients, half, 1, 1, at_work=clients[:3])
    assert len(drawn) == 2
    assert not set(drawn) & set(clients[:3])
    assert cohorts.draw(clients, half, 1, 1, at_work=clients[:7]) == []
    assert len(cohorts.draw(clients, half, 1, 1, may_drop_out=True)) == 7  # over_select


# over a broker: in memory, and mosquitto


@pytest.fixture(params=["memory", pytest.param("mosquitto", marks=pytest.mark.broker)])
def site(request):
    return request.getfixturevalue("bench" if request.param == "memory" else "real_bench")


def test_a_straggler_counts_in_a_later_round_as_fedbuff_says(site):
    site.device("d1"), site.device("d2")
    slow = site.device("d3", delay_s=0.5)
    site.wait_for(full=3)
    method, most = build_method(site.spec("fedavg")), 1000  # rounds take milliseconds
    fleet = site.fleet(site.spec("fedavg"), max_staleness=most)
    shared, at = {0: steps.start(method)}, 0
    for result in rounds.run(method, fleet, plan(most, 2, most), shared[0]):
        shared[result.round], at = result.shared, result.round
        assert result.selected == ("d1", "d2", "d3")
        assert len(result.responded) == 2
        if "d3" in result.responded:
            break
    staleness = result.staleness["d3"]
    assert staleness == at - 1  # it was asked in the first round
    assert [assignment.mode for assignment in slow.assignments] == ["train"]  # and never again meanwhile
    updates = []
    for id in result.responded:
        began = at - result.staleness.get(id, 0)
        up = site.client(id).train(method.at(began), began, shared[began - 1], {})[0]
        updates.append(Update(id, up.samples, up.parts, start=shared[began - 1], staleness=at - began))
    answers = [moved(update, shared[at - 1]) for update in updates]
    expected = steps.aggregate(method, shared[at - 1], answers)
    for part, params in expected.items():
        for name, tensor in params.items():
            assert tensor.allclose(result.shared[part][name], atol=1e-6), (part, name)
    fleet.close()


def test_a_device_past_the_bound_is_told_so_and_counts_nowhere(site):
    site.device("d1"), site.device("d2")
    slow = site.device("d3", delay_s=2.0)
    site.wait_for(full=3)
    method = build_method(site.spec("fedavg"))
    fleet = site.fleet(site.spec("fedavg"), max_staleness=1)
    cohort = CohortConfig(buffer_size=2, max_staleness=1, participation=0.99)  # two of three at once
    found = list(rounds.run(method, fleet, Plan(6, seed=1, cohort=cohort)))
    assert site.eventually(lambda: len(slow.acks) > 0)
    assert slow.acks[0].reason == "stale_round"
    assert not any("d3" in result.responded for result in found)
    accepted = registered_reports.of_run(site.inbox.journal.db, "t1")
    assert sum(len(result.responded) for result in found) <= len(accepted)
    assert {run_id.state for run_id in runs.requests_of(site.inbox.journal.db, "t1")} <= {
        "succeeded",
        "timed_out",
    }
    fleet.close()


def test_nothing_stays_behind_when_a_run_with_a_buffer_ends(site):
    site.device("d1"), site.device("d2"), site.device("d3", delay_s=0.3)
    site.wait_for(full=3)
    method = build_method(site.spec("fedavg"))
    fleet = site.fleet(site.spec("fedavg"), max_staleness=5)
    *_, last = rounds.run(method, fleet, plan(3, 2, 5))
    _, closing = rounds.final_personalisation(method, fleet, last.shared, 3)
    assert set(closing) == {"d1", "d2", "d3"}
    fleet.close()
    left = site.retained()
    assert not [
        topic for topic in left if topic.startswith(("art/", "round/")) or topic.endswith("dn/assignment")
    ]
