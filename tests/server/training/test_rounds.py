"""The round loop: attempts, quorum and the end of a run."""

from itertools import islice

import pytest

from edge_fl.errors import RunError
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl.metrics import afterwards
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training import cohorts, rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan

IDS = ("c0", "c1", "c2")


class Recovering(SequentialClients):
    """Only one client responds in the first `poor` attempts, all clients respond in the others."""

    def __init__(self, stage, method, poor):
        super().__init__({id: stage.client(id) for id in IDS}, method)
        self.attempts, self._poor = 0, poor

    def each(self, step, round, method, downs):
        self.attempts += step == "train"
        updates = super().each(step, round, method, downs)
        return islice(updates, 1) if self.attempts <= self._poor else updates


@pytest.mark.parametrize("poor", [0, 1, 2])
def test_a_round_is_repeated_until_its_quorum_responds(stage, poor):
    method = build_method(stage.spec("fedavg"))
    fleet = Recovering(stage, method, poor)
    (result,) = rounds.run(method, fleet, Plan(1, seed=1, cohort=CohortConfig(quorum=1.0, attempts=3)))
    assert (result.responded, result.attempts, fleet.attempts) == (IDS, poor + 1, poor + 1)
    (expected,) = rounds.run(method, Recovering(stage, method, 0), Plan(1, seed=1))
    assert same(result.shared, expected.shared)


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_run_ends_after_the_last_attempt_with_the_model_of_the_round_before(stage, attempts):
    method = build_method(stage.spec("fedavg"))
    fleet = Recovering(stage, method, poor=9)
    plan = Plan(1, seed=1, cohort=CohortConfig(quorum=1.0, attempts=attempts))
    message = (
        "round 1: 1 of 3 clients responded, expected at least 3; the run stops with the model of round 0"
    )
    with pytest.raises(RunError, match=message):
        next(rounds.run(method, fleet, plan))
    assert fleet.attempts == attempts


@pytest.mark.parametrize(
    ("name", "selected"), [("fedavg", [1, 1, 1, 1, 1, 1]), ("local", [3, 0, 3, 0, 0, 3])]
)
def test_a_share_of_the_clients_takes_part_and_local_trains_each_client_as_often(stage, name, selected):
    """With a third of three clients in a round, a client is drawn twice in six rounds; Local rounds up, from the first round on."""
    method = build_method(stage.spec(name))
    plan = Plan(6, seed=1, cohort=CohortConfig(participation=0.4))
    results = list(rounds.run(method, Recovering(stage, method, 0), plan))
    assert [len(result.selected) for result in results] == selected


def test_local_trains_as_many_clients_in_all_as_others_and_every_client_equally_often():
    cohort = CohortConfig(participation=0.1)
    trained = [round for round in range(1, 101) if cohorts.trains_everyone_in(cohort, round)]
    assert trained == list(range(1, 101, 10))
    assert all(cohorts.trains_everyone_in(CohortConfig(), round) for round in range(1, 101))
    changing = CohortConfig(participation=1.0, participation_from=0.5)
    assert sum(cohorts.trains_everyone_in(changing, round) for round in range(1, 101)) == 75


def test_after_a_change_on_the_server_every_client_is_evaluated_again(stage):
    """SphereFed's server computes a new head from the sums of all clients."""
    method = build_method(stage.spec("spherefed"))
    fleet = Recovering(stage, method, 0)
    (result,) = rounds.run(method, fleet, Plan(1, seed=1))
    final, metrics = rounds.final_personalisation(method, fleet, result.shared, 1)
    assert not same(final, result.shared)
    for client, report in rounds.evaluate(method, fleet, final, 1).items():
        assert afterwards(report).items() <= metrics[client].items()
