"""FedAS: alignment with the previous extractor, weights by Fisher information (docs/methods-personal-heads.md, "FedAS")."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Params
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy


def moved(params: Params, by: float) -> Params:
    """Other values of an extractor."""
    return {name: t + by if t.is_floating_point() else t for name, t in params.items()}


def test_a_later_round_equals_a_plain_loop() -> None:
    method = toy.method("fedas", optimiser=Sgd(0.05), align_lr=0.02)
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    own = {
        **own,
        "personal_extractor": moved(down["extractor"], 0.01),
        "history": {"trained": torch.ones(())},
    }
    data, net = toy.batches(), method.net
    previous = toy.module_of(net.extractor, own["personal_extractor"]).eval()
    with torch.no_grad():
        z = previous(data.x.float() / 255)
    means = {c: z[data.y == c].mean(0) for c in data.y.unique().tolist()}

    extractor, head = (
        toy.module_of(net.parts[n], p) for n, p in (("extractor", down["extractor"]), ("head", own["head"]))
    )
    align = torch.optim.SGD(extractor.parameters(), lr=0.02)
    for batch in data.batches("s1", 1, norm=True):
        found = extractor(batch.x)
        loss = sum(
            F.mse_loss(found[batch.y == c], means[c].expand_as(found[batch.y == c]))
            for c in batch.y.unique().tolist()
        )
        align.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        align.step()
    model = nn.Sequential(extractor, head)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in data.batches("train", 1, norm=True):
        optimiser.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimiser.step()
    trace = 0.0
    model.eval()
    for batch in data.batches("s2", 1):
        grads = torch.autograd.grad(F.cross_entropy(model(batch.x), batch.y), list(model.parameters()))
        trace += float(sum((g**2).sum() for g in grads))

    up, new = method.local_update(down, own, data)
    assert toy.same_as(up["extractor"], extractor) and toy.same_as(new["head"], head)
    assert float(up["fisher"]["trace"]) == pytest.approx(trace, rel=1e-4)
    assert tree.same(new["personal_extractor"], up["extractor"])


def test_the_alignment_brings_features_to_the_previous_class_means() -> None:
    method = toy.method("fedas", epochs=0, align_epochs=20, align_lr=0.5)
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    previous, data = moved(down["extractor"], 0.1), toy.batches()
    own = {**own, "personal_extractor": previous, "history": {"trained": torch.ones(())}}

    def away(extractor: Params) -> float:
        z, target = (data.features(method.net.extractor, p).x for p in (extractor, previous))
        return float(sum((z[data.y == c].mean(0) - target[data.y == c].mean(0)).norm() for c in range(5)))

    up, _ = method.local_update(down, own, data)
    assert away(up["extractor"]) < 0.5 * away(down["extractor"])


def test_the_first_participation_is_fedpers() -> None:
    run, plain = (toy.federate(toy.method(name), rounds=1) for name in ("fedas", "fedper"))
    for id in run.own:
        assert tree.same(run.updates[0][id].parts["extractor"], plain.updates[0][id].parts["extractor"])
        assert tree.same(run.own[id]["head"], plain.own[id]["head"])


def test_the_server_weighs_extractors_by_their_traces() -> None:
    method = toy.method("fedas")
    shared = {"extractor": {"w": torch.tensor(7.0)}}

    def sent(client: str, value: float, trace: float) -> Update:
        parts = {"extractor": {"w": torch.tensor(value)}, "fisher": {"trace": torch.tensor(trace)}}
        return Update(client, 99, parts)

    new = method.aggregate(shared, iter([sent("a", 1.0, 3.0), sent("b", 5.0, 1.0), sent("c", 100.0, -1.0)]))
    assert float(new["extractor"]["w"]) == 2.0
    assert new.keys() == {"extractor"}
    assert method.aggregate(shared, iter([sent("a", 1.0, 0.0)])) == shared


def test_a_client_predicts_with_its_own_extractor_once_it_has_trained() -> None:
    run = toy.federate(toy.method("fedas"), rounds=1, cohort=lambda number: ["c0", "c4"])
    x = run.images("c0")
    trained = {"extractor": run.own["c0"]["personal_extractor"], "head": run.own["c0"]["head"]}
    assert torch.equal(run.predict("c0"), run.method.classify(trained, x))
    x = run.images("c1")
    assert torch.equal(run.predict("c1"), run.method.classify({**run.own["c1"], **run.shared}, x))


def test_an_update_without_a_trace_does_not_count() -> None:
    method = toy.method("fedas")
    shared = {"extractor": {"w": torch.tensor(7.0)}}
    assert method.aggregate(shared, [Update("a", 9, {"extractor": {"w": torch.tensor(1.0)}})]) == shared
