"""Fed-RoD: a balanced generic head and a personal head on top (docs/methods-personal-heads.md, "Fed-RoD"). Loss: see test_losses.py."""

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from tests.edge_fl.methods import toy


def sent(method: Method, own: Parts, data: Batches) -> Parts:
    return method.local_update(steps.start(method), own, data)[0]


def test_the_personal_head_is_trained_and_not_sent() -> None:
    run = toy.federate(toy.method("fed-rod"))
    assert all(u.parts.keys() == {"extractor", "head"} for updates in run.updates for u in updates.values())
    assert not tree.same(run.own["c0"]["personal_head"], run.own["c4"]["personal_head"])


def test_its_step_leaves_extractor_and_generic_head_alone() -> None:
    method = toy.method("fed-rod")
    own = steps.start_own(method, "c0")
    other = tree.map(lambda t: t + 10 * torch.ones_like(t), own)
    assert tree.same(sent(method, own, toy.batches()), sent(method, other, toy.batches()))


def test_with_equally_many_samples_of_each_class_the_generic_step_is_fedavgs() -> None:
    data = toy.batches()
    rows = torch.cat([torch.nonzero(data.y == c)[:3, 0] for c in range(toy.CLASSES)])
    even = Batches.of(data.x[rows], data.y[rows], classes=toy.CLASSES, batch_size=8)
    assert even.counts.tolist() == [3.0] * toy.CLASSES
    method, plain = toy.method("fed-rod"), toy.method("fedavg")
    found, expected = sent(method, steps.start_own(method, ""), even), sent(plain, {}, even)
    for path, tensor in tree.parameters(expected).items():
        assert torch.allclose(tree.parameters(found)[path], tensor, atol=1e-5), path


def test_on_uneven_counts_it_is_not_but_for_exponent_zero() -> None:
    plain = sent(toy.method("fedavg"), {}, toy.batches("c1"))
    for exponent, same in [(1.0, False), (0.0, True)]:
        method = toy.method("fed-rod", exponent=exponent)
        assert tree.same(sent(method, steps.start_own(method, "c1"), toy.batches("c1")), plain) == same


def test_both_heads_logits_add_up_and_the_global_model_is_the_generic_head() -> None:
    run = toy.federate(toy.method("fed-rod"))
    x = toy.batches("c0").x[:4].float() / 255
    down, own = steps.broadcast(run.method, run.shared, "c0"), run.own["c0"]
    z = run.method.features(down, x)
    generic = run.method.net.head(down["head"], z)
    special = run.method.net.head(own["personal_head"], z)
    assert steps.predict(run.method, down, own, x).allclose(generic + special)
    assert steps.predict_global(run.method, down, x).allclose(generic)


def test_the_hypernetwork_generates_each_clients_head_from_its_class_frequencies() -> None:
    run = toy.federate(toy.method("fed-rod", hypernetwork=16))
    parts = {"extractor", "head", "hypernetwork"}
    assert all(u.parts.keys() == parts for updates in run.updates for u in updates.values())
    x, own = run.images("c0"), run.own["c0"]
    counts = toy.batches("c0").counts
    assert own.keys() == {"frequencies"}
    assert torch.allclose(own["frequencies"]["share"], counts / counts.sum())
    down = steps.broadcast(run.method, run.shared, "c0")
    first, last = ((down["hypernetwork"][f"{i}.weight"], down["hypernetwork"][f"{i}.bias"]) for i in (0, 2))
    hidden = (own["frequencies"]["share"] @ first[0].T + first[1]).relu()
    head = (hidden @ last[0].T + last[1]).reshape(toy.CLASSES, -1)
    z = run.method.features(down, x)
    expected = run.method.classify(down, x) + z @ head[:, :-1].T + head[:, -1]
    assert steps.predict(run.method, down, own, x).allclose(expected, atol=1e-5)
    other = steps.predict(run.method, down, run.own["c1"], x)
    assert not other.allclose(expected, atol=1e-3)


def test_the_hypernetwork_does_not_change_extractor_and_generic_head() -> None:
    linear, generated = toy.method("fed-rod"), toy.method("fed-rod", hypernetwork=8)
    ups = [sent(m, steps.start_own(m, "c0"), toy.batches()) for m in (linear, generated)]
    for name in ("extractor", "head"):
        assert all(torch.allclose(t, ups[1][name][key], atol=1e-6) for key, t in ups[0][name].items())
    assert not tree.same(ups[1]["hypernetwork"], steps.start(generated)["hypernetwork"])


def test_a_client_that_never_trained_gets_a_head_from_its_frequencies() -> None:
    method = toy.method("fed-rod", hypernetwork=8)
    down, own = steps.start(method), steps.start_own(method, "c2")
    assert float(own["frequencies"]["share"].sum()) == 0.0
    up, own = steps.personalise(method, down, own, toy.batches("c2"))
    assert up == {}
    assert float(own["frequencies"]["share"].max()) == pytest.approx(1.0)  # one class
