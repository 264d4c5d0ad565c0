"""Ditto: a personal model regularised towards the global one (docs/methods-personal-models.md, "Ditto"). λ = 0: see test_identities.py."""

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import scalar, toy


def gap(run: toy.Federation, client: str) -> float:
    """Distance of a client's v from the w that it received last."""
    v = tree.parameters(tree.unprefixed("personal_", run.own[client]))
    w = tree.parameters(run.downs[-1][client])
    return float(torch.stack([(v[path] - w[path]).norm() ** 2 for path in v]).sum().sqrt())


def test_a_large_lambda_pulls_v_to_w() -> None:
    free, held = (
        toy.federate(toy.method("ditto", optimiser=Sgd(1e-3), epochs=5, lam=lam)) for lam in (0.0, 900.0)
    )
    assert gap(held, "c0") < 0.2 * gap(free, "c0")


def test_the_anchor_is_the_model_received_not_the_one_trained_in_this_round() -> None:
    method = scalar.method("ditto", lambda w, batch: w, Sgd(0.1), lam=0.5)
    own: Parts = {"personal_extractor": {"w": torch.tensor(3.0)}, "personal_head": {}}
    up, kept = method.local_update(scalar.parts(1.0), own, scalar.batches(1))
    assert scalar.value(kept, "personal_extractor") == pytest.approx(3 - 0.1 * (1 + 0.5 * (3 - 1)))
    assert scalar.value(up) == pytest.approx(0.9)


def test_v_persists_differs_between_clients_and_may_train_longer() -> None:
    run, longer = (toy.federate(toy.method("ditto", personal_epochs=epochs)) for epochs in (0, 3))
    assert not tree.same(run.own["c0"], run.own["c1"])
    assert tree.same(run.shared, longer.shared)
    assert not tree.same(run.own["c0"], longer.own["c0"])
    absent = toy.federate(
        toy.method("ditto"), rounds=3, cohort=lambda number: ["c0"] if number == 1 else ["c1"]
    )
    assert tree.same(
        absent.own["c0"], toy.federate(toy.method("ditto"), rounds=1, cohort=lambda number: ["c0"]).own["c0"]
    )


def test_a_client_that_never_trained_predicts_with_the_received_model() -> None:
    """Its v still has initial values (docs/methods.md G16)."""
    run = toy.federate(toy.method("ditto"), rounds=3, cohort=lambda number: ["c0", "c1"])
    for client, personal in (("c0", True), ("c4", False)):
        down = steps.broadcast(run.method, run.shared, client)
        found = run.clients[client].evaluate(run.method, down, run.own[client])
        assert (found["personal.test_acc.before"] == found["global.test_acc"]) != personal
    own = run.clients["c4"].personalise(
        run.method, 4, steps.broadcast(run.method, run.shared, "c4"), run.own["c4"]
    )[1]
    assert tree.same(tree.unprefixed("personal_", own), run.shared)
