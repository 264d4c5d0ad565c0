"""pFedMe: θ minimises the regularised loss, w steps towards θ (docs/methods-personal-models.md, "pFedMe")."""

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.pictures import pixels
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import scalar, toy

NEVER = {"history": {"trained": torch.zeros(())}}


def test_on_a_quadratic_theta_is_the_proximal_point_and_w_steps_to_it() -> None:
    method = scalar.method(
        "pfedme", lambda w, batch: 0.5 * w**2, Sgd(0.005), inner_steps=50, inner_lr=0.05, batches=1
    )
    up, own = method.local_update(scalar.parts(1.0), NEVER, scalar.batches(3))
    assert scalar.value(own, "personal_extractor") == pytest.approx(0.9375)  # (a + λ w) / (1 + λ)
    assert scalar.value(up) == pytest.approx(0.9953125)  # 1 - 0.075 * 0.0625
    assert own["history"]["trained"] == 1


def test_theta_continues_from_batch_to_batch() -> None:
    def theta(batches: int) -> float:
        method = scalar.method(
            "pfedme", lambda w, b: 0.5 * w**2, Sgd(0.0), inner_steps=1, inner_lr=0.05, batches=batches
        )
        return scalar.value(
            method.local_update(scalar.parts(1.0), NEVER, scalar.batches(2))[1], "personal_extractor"
        )

    assert theta(1) == pytest.approx(0.95)
    assert theta(2) == pytest.approx(0.95 - 0.05 * (0.95 + 15 * (0.95 - 1)))
    assert theta(4) < theta(2)  # more batches than an epoch has


def test_with_beta_zero_the_shared_model_is_constant() -> None:
    run = toy.federate(toy.method("pfedme", beta=0.0))
    before = tree.leaves(run.history[0])
    assert all(t.equal(before[path]) for path, t in tree.leaves(run.shared).items() if t.is_floating_point())


def test_with_lambda_zero_clients_do_not_change_w() -> None:
    run = toy.federate(toy.method("pfedme", lam=0.0), rounds=1)
    for update in run.updates[0].values():
        assert tree.same(tree.parameters(update.parts), tree.parameters(run.history[0]))
    assert not tree.same(run.own["c0"]["personal_head"], run.history[0]["head"])


def test_with_beta_two_the_server_steps_beyond_the_mean_but_not_for_statistics() -> None:
    method, name = toy.method("pfedme", beta=2.0), "buffer:extractor.convolutions.1.running_var"
    old = steps.start(method)
    new = tree.map(lambda t: 0.1 * t if t.is_floating_point() else t + 1, old)
    mean = steps.aggregate(method, old, [Update("c0", 3, new), Update("c1", 5, new)])
    assert mean["head"]["weight"].allclose((2 * 0.1 - 1) * old["head"]["weight"])
    assert mean["extractor"][name].equal(new["extractor"][name])  # else a variance of -0.8


def test_who_never_trained_predicts_with_the_present_w_and_others_with_their_theta() -> None:
    run = toy.federate(toy.method("pfedme"), cohort=lambda number: ["c0", "c1"])
    x = pixels(torch.from_numpy(run.clients["c4"].data.test.x))
    down = steps.broadcast(run.method, run.shared, "c4")
    of_w = steps.predict_global(run.method, run.shared, x)
    assert steps.predict(run.method, down, run.own["c4"], x).equal(of_w)
    assert not steps.predict(run.method, down, run.own["c0"], x).allclose(of_w)
