"""Simulated clients drop out and are slow as configured, the same with every engine and in every resumed run."""

from functools import partial

import pytest

from edge_fl.errors import ConfigError
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl_server.orchestrate.execution import prepare, simulated_clients
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, with_settings
from edge_fl_server.training import rounds
from edge_fl_server.training.clients import Broadcasts
from edge_fl_server.training.engines.simulated import SequentialClients, with_epochs
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.unreliable import UnreliableClients

IDS = tuple(f"c{number}" for number in range(8))


def unreliable(stage, method, **settings) -> UnreliableClients:
    clients = SequentialClients({id: stage.client(id) for id in IDS}, method)
    return UnreliableClients(clients, CohortConfig(**settings), 1)


def test_a_share_of_each_cohort_trains_in_vain(stage):
    method = build_method(stage.spec("fedrep"))
    found = list(rounds.run(method, unreliable(stage, method, drop_out=0.3), Plan(6, 1)))
    assert all(
        result.selected == IDS and len(result.responded) == 6 for result in found
    )  # floor(0.3 * 8) = 2
    assert len({result.responded for result in found}) > 2
    again = list(rounds.run(method, unreliable(stage, method, drop_out=0.3), Plan(6, 1)))
    assert [result.responded for result in again] == [result.responded for result in found]
    fleet = unreliable(stage, method, drop_out=0.3)
    (result,) = rounds.run(method, fleet, Plan(1, 1))
    personal, fresh = dict(fleet.personal_state()), method.init_own
    for lost in set(IDS) - set(result.responded):  # as in PFLlib: its personal parts were trained
        assert not same(personal[lost], fresh(lost))


def test_slow_clients_train_half_of_the_epochs_in_every_round(stage):
    method = with_epochs(build_method(stage.spec("fedavg")), 4)
    fleet = unreliable(stage, method, slow_training=0.5)
    plain, half = (SequentialClients({id: stage.client(id) for id in IDS}, method) for _ in range(2))
    down = dict(Broadcasts(partial(steps.broadcast, method, method.init_shared()), IDS).items())
    drawn = []
    for round in (1, 2):
        found = {update.client: update.parts for update in fleet.each("train", round, method, down)}
        whole = {update.client: update.parts for update in plain.each("train", round, method, down)}
        less = {
            update.client: update.parts for update in half.each("train", round, with_epochs(method, 2), down)
        }
        slow = {id for id in IDS if same(found[id], less[id])}
        assert len(slow) == 4 and all(same(found[id], whole[id]) for id in set(IDS) - slow)
        drawn.append(slow)
    assert drawn[0] == drawn[1]


def test_fine_tuning_has_the_epochs_of_its_inner_method(stage):
    tuned = with_epochs(build_method(stage.spec("fedavg+ft")), 7)
    assert tuned.epochs == tuned.inner.epochs == 7


RECIPE = with_settings(
    Recipe(engine="sequential"),
    [
        "data.clients=6",
        "data.fraction=0.2",
        "rounds=2",
        "method.epochs=2",
        "model.options={feature_dim=8, width=4}",
    ],
)


@pytest.mark.slow
def test_all_engines_train_the_same_epochs():
    recipe = with_settings(RECIPE, ["cohort.slow_training=0.5"])
    ends = {}
    for engine in ("sequential", "pool", "vector"):
        setup = prepare(with_settings(recipe, [f"engine={engine}"]))
        fleet = simulated_clients(setup)
        assert fleet.engine == engine
        *_, last = rounds.run(setup.method, fleet, Plan.of(setup.recipe, setup.method))
        ends[engine] = last.shared["head"]["weight"]
    assert ends["pool"].tolist() == ends["sequential"].tolist()
    assert ends["vector"].allclose(ends["sequential"], atol=1e-4)


def test_slow_senders_come_later(stage):
    recipe = with_settings(RECIPE, ["rounds=12", "cohort.buffer_size=2", "cohort.slow_sending=0.5"])
    setup = prepare(recipe)
    counts = dict.fromkeys(setup.study.split.clients, 0)
    fleet = simulated_clients(setup)
    for result in rounds.run(setup.method, fleet, Plan.of(recipe, setup.method)):
        for client in result.responded:
            counts[client] += 1
    slow = fleet._slow
    assert len(slow) == 3
    assert sum(counts[id] for id in slow) < sum(counts[id] for id in counts.keys() - slow) / 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["cohort.drop_out=0.2", "cohort.buffer_size=2"],
            r"cohort\.drop_out = 0\.2: expected .*buffer_size = 0",
        ),
        (["cohort.drop_out=0.2", "source=fleet"], "simulated clients"),
        (["cohort.slow_training=0.2", "method.epochs=1"], "2 or more method.epochs"),
        (["cohort.slow_sending=0.2"], "buffer_size > 0"),
        (["cohort.drop_out=0.6"], r"drop_out 0\.6 and quorum 0\.5: expected at most 1 together"),
        (["cohort.drop_out=1.0"], "drop_out"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as raised:
        prepare(with_settings(RECIPE, settings))
    assert "\n" not in str(raised.value)
