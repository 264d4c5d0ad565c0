"""FedDBE: a personal bias of the features, and a pull of their mean (docs/methods-global.md, "FedDBE")."""

import pytest
import torch
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.optimiser import Sgd
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy

KNOWN = {"mean": torch.linspace(-1, 1, 12), "known": torch.ones(())}


def test_a_later_round_equals_a_plain_loop() -> None:
    method = toy.method("feddbe", epochs=2, optimiser=Sgd(0.1), kappa=3.0, momentum=0.4)
    down = {**steps.broadcast(method, steps.start(method), "c0"), "feature_mean": KNOWN}
    extractor, head = (toy.module_of(method.net.parts[name], down[name]) for name in ("extractor", "head"))
    bias = torch.full((12,), 0.1, requires_grad=True)
    own, data = {"bias": {"vector": bias.detach().clone()}}, toy.batches()
    optimiser = torch.optim.SGD([*extractor.parameters(), *head.parameters(), bias], lr=0.1)
    running = torch.zeros(12)
    for batch in data.batches("train", 2, norm=True):
        z = extractor(batch.x)
        running = 0.6 * running.detach() + 0.4 * z.mean(0)
        pull = torch.mean(0.5 * (running - KNOWN["mean"]) ** 2)
        optimiser.zero_grad()
        (F.cross_entropy(head(z + bias), batch.y) + 3.0 * pull).backward()
        optimiser.step()
    up, new = method.local_update(down, own, data)
    assert toy.same_as(up["extractor"], extractor) and toy.same_as(up["head"], head)
    assert torch.allclose(new["bias"]["vector"], bias, atol=1e-6)
    assert torch.allclose(up["feature_mean"]["mean"], running, atol=1e-6)


def test_the_first_round_is_fedavgs_and_measures_the_mean_feature_once() -> None:
    run, plain = toy.federate(toy.method("feddbe")), toy.federate(toy.method("fedavg"), rounds=1)
    for name in ("extractor", "head"):
        assert tree.same(run.history[1][name], plain.shared[name])
    assert [{"feature_mean" in u.parts for u in sent.values()} for sent in run.updates] == [{True}, {False}]
    weights = {
        u.client: u.samples / sum(v.samples for v in run.updates[0].values()) for u in run.updates[0].values()
    }
    expected = sum(weights[u.client] * u.parts["feature_mean"]["mean"] for u in run.updates[0].values())
    assert torch.allclose(run.history[1]["feature_mean"]["mean"], expected, atol=1e-6)
    assert tree.same(run.history[1]["feature_mean"], run.history[2]["feature_mean"])
    assert float(run.shared["feature_mean"]["known"]) == 1


def test_the_bias_stays_on_its_client_and_moves_from_the_second_round_on() -> None:
    run = toy.federate(toy.method("feddbe"), rounds=1)
    assert not run.own["c0"]["bias"]["vector"].any()
    run = toy.federate(toy.method("feddbe"), rounds=2)
    assert run.own["c0"]["bias"]["vector"].any()
    assert not torch.equal(run.own["c0"]["bias"]["vector"], run.own["c4"]["bias"]["vector"])


@pytest.mark.parametrize("kappa", [0.0, 5.0])
def test_the_pull_brings_features_to_the_global_mean(kappa: float) -> None:
    method = toy.method("feddbe", epochs=5, kappa=kappa)
    down = {**steps.broadcast(method, steps.start(method), "c0"), "feature_mean": KNOWN}
    up, _ = method.local_update(down, steps.start_own(method, "c0"), toy.batches())
    away = float(((up["feature_mean"]["mean"] - KNOWN["mean"]) ** 2).mean())
    assert (away < 0.05) == (kappa > 0), away


def test_predictions_add_the_bias() -> None:
    run = toy.federate(toy.method("feddbe"))
    parts = {**run.shared, **run.own["c0"]}
    x = run.images("c0")
    z = run.method.features(parts, x) + run.own["c0"]["bias"]["vector"]
    expected = z @ parts["head"]["weight"].T + parts["head"]["bias"]
    assert torch.allclose(run.predict("c0"), expected, atol=1e-5)
