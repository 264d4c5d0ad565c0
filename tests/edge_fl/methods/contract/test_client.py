"""The work of one client: what it measures around its local update (docs/methods.md G13)."""

from dataclasses import replace

import pytest

from edge_fl import metrics
from edge_fl.methods import names
from edge_fl.methods.contract import steps, tiers
from edge_fl.methods.contract.client import Client
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.engines.vector import VectorClients
from edge_fl_server.training.rounds import Plan
from tests.edge_fl.methods import toy


@pytest.mark.parametrize("name", names())
def test_a_client_measures_its_own_parts_before_aggregation(name: str) -> None:
    method = replace(toy.method(name), evaluate_every=2)
    client, run = toy.clients()["c0"], toy.federate(method, rounds=1)
    assert metrics.PERSONAL_LOCAL not in run.updates[0]["c0"].metrics
    down = steps.broadcast(method, run.shared, "c0")
    update, own = client.train(method, 2, down, run.own["c0"])
    if not method.predicts_early:
        assert not update.metrics
        return
    up, _ = steps.trained(method, down, run.own["c0"], client.batches(2))
    logits = steps.predict(method, method.after_training(down, up), own, run.images("c0"))
    accuracy = metrics.accuracy(logits.argmax(1).numpy(), client.data.test.y)
    assert update.metrics[metrics.PERSONAL_LOCAL] == accuracy
    assert set(update.metrics) <= set(tiers.of_full(method).numbers)


@pytest.mark.parametrize("name", ["fedper", "dualfed"])
def test_it_is_the_model_that_one_client_alone_aggregates(name: str) -> None:
    """With one client, the aggregate is its own update: both timings agree."""
    method = replace(toy.method(name), evaluate_every=1)
    fleet = SequentialClients({"c0": toy.clients()["c0"]}, method)
    (result,) = rounds.run(method, fleet, Plan(1, seed=3, evaluate_every=1))
    found = result.metrics["c0"]
    assert found[metrics.PERSONAL_LOCAL] == found[metrics.PERSONAL_BEFORE]


def test_fedcp_predicts_behind_the_received_head_not_behind_the_mixture_it_sends() -> None:
    method = toy.method("fedcp")
    run = toy.federate(method, rounds=1)
    down = run.downs[0]["c0"]
    after = method.after_training(down, run.updates[0]["c0"].parts)
    assert after["head"] is down["head"] and after["extractor"] is run.updates[0]["c0"].parts["extractor"]


@pytest.mark.parametrize("engine", [SequentialClients, VectorClients])
def test_rounds_with_evaluation_report_both_timings(engine: type[SequentialClients]) -> None:
    method = replace(toy.method("fedrep"), evaluate_every=2)
    clients: dict[str, Client] = toy.clients()
    first, second = rounds.run(method, engine(clients, method), Plan(2, seed=3, evaluate_every=2))
    assert not first.metrics
    for found in second.metrics.values():
        assert {metrics.PERSONAL_LOCAL, metrics.PERSONAL_BEFORE, metrics.TEST_SAMPLES} <= found.keys()
    assert any(m[metrics.PERSONAL_LOCAL] != m[metrics.PERSONAL_BEFORE] for m in second.metrics.values())
