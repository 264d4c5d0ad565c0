"""FedNTD: distillation without the sample's own class (docs/methods-global.md, "FedNTD")."""

import pytest
import torch
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.losses import kl
from edge_fl.learn.optimiser import Sgd
from edge_fl.methods.contract import steps
from edge_fl.methods.fedntd import not_true
from tests.edge_fl.methods import toy

MODEL = ("extractor", "head")


def test_an_update_equals_a_plain_loop() -> None:
    method = toy.method("fedntd", epochs=2, optimiser=Sgd(0.1), beta=3.0, tau=2.0)
    down, data = steps.broadcast(method, toy.federate(method, rounds=1).shared, "c0"), toy.batches()
    modules, teachers = (
        {name: toy.module_of(method.net.parts[name], down[name]) for name in MODEL} for _ in range(2)
    )
    for teacher in teachers.values():
        teacher.eval().requires_grad_(False)
    optimiser = torch.optim.SGD([t for m in modules.values() for t in m.parameters()], lr=0.1)
    for batch in data.batches("train", 2, norm=True):
        student = modules["head"](modules["extractor"](batch.x))
        received = teachers["head"](teachers["extractor"](batch.x))
        others = F.one_hot(batch.y, toy.CLASSES) == 0
        s, t = (logits[others].view(len(batch.y), -1) / 2.0 for logits in (student, received))
        distilled = 4.0 * F.kl_div(s.log_softmax(1), t.softmax(1), reduction="batchmean")
        optimiser.zero_grad()
        (F.cross_entropy(student, batch.y) + 3.0 * distilled).backward()
        optimiser.step()
    up, own = method.local_update(down, {}, data)
    assert not own and all(toy.same_as(up[name], module) for name, module in modules.items())


def test_the_distillation_leaves_out_the_label() -> None:
    student, teacher = torch.tensor([[0.0, 0.0, 5.0]]), torch.tensor([[2.0, 0.0, -1.0]])
    y = torch.tensor([2])
    assert float(kl(not_true(student, y), not_true(teacher, y))) == pytest.approx(0.327813, abs=1e-6)
    assert float(kl(student, teacher)) > 1
    for temperature in (1e-3, 1.0, 1e3):
        s, t = (not_true(logits / temperature, y).requires_grad_() for logits in (student, teacher))
        loss = kl(s, t.detach())
        (slope,) = torch.autograd.grad(loss, s)
        assert loss.isfinite() and slope.isfinite().all() and slope[0, 2] == 0


def test_without_its_term_a_client_trains_as_under_fedavg() -> None:
    plain, found = toy.method("fedavg"), toy.method("fedntd", beta=0.0)
    down = steps.start(plain)
    expected = plain.local_update(down, {}, toy.batches())[0]
    assert tree.same(found.local_update(down, {}, toy.batches())[0], expected)
    assert not tree.same(toy.method("fedntd").local_update(down, {}, toy.batches())[0], expected)


def test_the_logits_of_other_classes_stay_near_those_of_the_received_model() -> None:
    """On c2, which has one class."""
    net, data = toy.net(norm=False), toy.batches(toy.SINGLE)
    shared = toy.federate(toy.method("fedavg", net, epochs=5)).shared
    down, x = {name: shared[name] for name in MODEL}, data.x.float() / 255
    apart = []
    for beta in (0.0, 3.0):
        method = toy.method("fedntd", net, beta=beta, epochs=20)
        up, _ = method.local_update(down, {}, data)
        after, before = (not_true(method.classify(parts, x), data.y) for parts in (up, down))
        apart.append(float(kl(after, before)))
    assert apart[1] < apart[0] / 2, apart


def test_clients_of_any_size_weigh_equally() -> None:
    method = toy.method("fedntd")
    old = steps.start(method)
    new = tree.map(lambda t: 3 * t if t.is_floating_point() else t, old)
    mean = steps.aggregate(method, old, [Update("c0", 1, old), Update("c1", 500, new)])
    assert mean["head"]["weight"].allclose(2 * old["head"]["weight"])
