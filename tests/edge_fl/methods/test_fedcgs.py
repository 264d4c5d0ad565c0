"""FedCGS: a head from sums over all clients' features (docs/methods-global.md, "FedCGS")."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.optimiser import Sgd
from edge_fl.methods.contract import steps
from edge_fl.methods.fedcgs import closed_form
from tests.edge_fl.methods import toy


def test_the_head_equals_that_of_all_features_together() -> None:
    method = toy.method("fedcgs", ridge=0.01)
    run = toy.federate(method, rounds=1)
    data = [client.batches(1) for client in run.clients.values()]
    z = torch.cat([d.features(method.net.extractor, run.shared["extractor"]).x for d in data]).double()
    y = torch.cat([d.y for d in data])
    means = torch.stack([z[y == c].mean(0) for c in range(10)])
    covariance = torch.cov(z.T)
    inverse = torch.linalg.inv(covariance + 0.01 * covariance.trace() / 12 * torch.eye(12))
    weight = means @ inverse
    bias = -0.5 * torch.diag(means @ inverse @ means.T) + torch.log(torch.bincount(y, minlength=10) / len(y))
    logits = z @ weight.T + bias
    found = z.float() @ run.shared["head"]["weight"].T + run.shared["head"]["bias"]
    assert torch.allclose(found.double(), logits, rtol=1e-3, atol=1e-2)
    assert torch.allclose(run.shared["prototypes"]["mean"].double(), means, atol=1e-5)


def test_features_of_another_size_give_the_same_logits() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(60, 5).double(), torch.arange(60) % 3
    logits = []
    for size in (1e-3, 1.0, 1e3):
        means = torch.stack([(size * z)[y == c].mean(0) for c in range(3)])
        known = {"mean": means, "count": torch.full((3,), 20.0).double()}
        head = closed_form(known, (size * z).T @ (size * z), 0.1)
        logits.append(size * z @ head["weight"].T + head["bias"])
    assert all(torch.allclose(each, logits[1], rtol=1e-9) for each in logits)


def test_clients_may_come_in_any_round_and_count_once() -> None:
    together = toy.federate(toy.method("fedcgs"), rounds=1)
    here = {1: ["c0", "c3"], 2: ["c0", "c1", "c2"], 3: ["c2", "c4"]}
    apart = toy.federate(toy.method("fedcgs"), rounds=3, cohort=lambda number: here[number])
    assert torch.equal(apart.shared["prototypes"]["count"], together.shared["prototypes"]["count"])
    assert torch.allclose(apart.shared["sums"]["gram"], together.shared["sums"]["gram"], rtol=1e-4)
    assert torch.allclose(apart.shared["head"]["bias"], together.shared["head"]["bias"], rtol=1e-2)
    assert apart.shared["counted"].keys() == set(apart.clients)


def test_the_extractor_stays_and_only_statistics_travel_up() -> None:
    run = toy.federate(toy.method("fedcgs"))
    assert tree.same(run.shared["extractor"], run.history[0]["extractor"])
    assert all(u.parts.keys() == {"prototypes", "sums"} for sent in run.updates for u in sent.values())
    assert all(down.keys() == {"extractor", "head", "prototypes"} for down in run.downs[1].values())


def test_an_incomplete_update_changes_nothing() -> None:
    run = toy.federate(toy.method("fedcgs"), rounds=1)
    partial = Update("x", 5, {"sums": run.updates[0]["c0"].parts["sums"]})
    assert tree.same(run.method.aggregate(run.shared, [partial])["sums"], run.shared["sums"])


def test_a_class_without_samples_has_no_say() -> None:
    run = toy.federate(toy.method("fedcgs"), rounds=1, cohort=lambda number: [toy.SINGLE])
    assert tree.first_not_finite(run.shared) is None
    assert run.method.predict(run.shared, run.images("c0")).argmax(1).unique().tolist() == [7]


def test_a_single_sample_in_all_gives_a_finite_head() -> None:
    method = toy.method("fedcgs")
    shared, data = steps.start(method), toy.batches()
    one = replace(data, x=data.x[:1], y=data.y[:1])
    up, _ = steps.local_update(method, steps.broadcast(method, shared, "c0"), {}, one)
    new = steps.aggregate(method, shared, [Update("c0", 1, up)])
    assert tree.first_not_finite(new) is None and not tree.same(new["head"], shared["head"])


def test_the_final_training_equals_a_plain_loop() -> None:
    method = toy.method("fedcgs", ft_epochs=2, lam=0.7, optimiser=Sgd(0.05))
    run, data = toy.federate(method, rounds=1), toy.batches(round=2)
    extractor, head = (
        toy.module_of(method.net.parts[n], p)
        for n, p in (("extractor", run.shared["extractor"]), ("head", method.net.head.init()))
    )
    model, means = nn.Sequential(extractor, head), run.shared["prototypes"]["mean"]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in data.batches("ft", 2, norm=True):
        optimiser.zero_grad()
        z = extractor(batch.x)
        (F.cross_entropy(head(z), batch.y) + 0.7 * F.mse_loss(z, means[batch.y])).backward()
        optimiser.step()
    down = steps.broadcast(method, run.shared, "c0")
    _, own = steps.personalise(method, down, run.own["c0"], data)
    assert toy.same_as(own["tuned_extractor"], extractor, 1e-5) and toy.same_as(own["tuned_head"], head, 1e-5)
