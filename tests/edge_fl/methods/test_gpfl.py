"""GPFL: global and personalised features behind a conditional valve (docs/methods-personal-heads.md, "GPFL")."""

import torch
from torch import Tensor
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.optimiser import Sgd
from edge_fl.methods.contract import steps
from edge_fl.methods.gpfl import own_shares
from tests.edge_fl.methods import toy


def test_a_round_equals_a_plain_loop() -> None:
    method = toy.method("gpfl", epochs=2, optimiser=Sgd(0.05), lam=0.3, mu=0.2)
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    data, parts = toy.batches(), {**down, **own}
    names = ("extractor", "valve", "embeddings", "personal_head")
    extractor, valve, embeddings, head = (toy.module_of(method.net.parts[n], parts[n]) for n in names)
    frozen = down["embeddings"]["weight"].clone()
    general = sum(frozen[c] / 10 for c in range(10))
    special = sum(frozen[c] * int((data.y == c).sum()) / len(data) for c in range(10))

    def gated(z: Tensor, condition: Tensor) -> Tensor:
        return F.relu(z * (valve.gamma(condition) + 1) + valve.beta(condition))

    plain = torch.optim.SGD([*extractor.parameters(), *head.parameters()], lr=0.05)
    decayed = torch.optim.SGD([*valve.parameters(), *embeddings.parameters()], lr=0.05, weight_decay=0.2)
    for batch in data.batches("train", 2, norm=True):
        z = extractor(batch.x)
        common = gated(z, general)
        angles = F.linear(F.normalize(common), F.normalize(embeddings.weight))
        loss = F.cross_entropy(head(gated(z, special)), batch.y)
        loss = loss + F.cross_entropy(angles, batch.y) + 0.3 * torch.norm(common - frozen[batch.y])
        plain.zero_grad()
        decayed.zero_grad()
        loss.backward()
        plain.step()
        decayed.step()
    up, new = method.local_update(down, own, data)
    found = zip(names, (extractor, valve, embeddings, head), strict=True)
    assert all(toy.same_as({**up, **new}[name], module, 1e-5) for name, module in found)


def test_heads_and_class_shares_stay_on_their_clients() -> None:
    run = toy.federate(toy.method("gpfl"))
    sent = {"extractor", "valve", "embeddings"}
    assert all(update.parts.keys() == sent for updates in run.updates for update in updates.values())
    assert torch.equal(run.own[toy.SINGLE]["shares"]["classes"], torch.eye(10)[7])


def test_the_personal_condition_weighs_embeddings_by_the_clients_classes() -> None:
    run = toy.federate(toy.method("gpfl"))
    parts, x = {**run.shared, **run.own[toy.SINGLE]}, run.images(toy.SINGLE)
    z = run.method.features(parts, x)
    gamma, beta = run.method.net.valve(parts["valve"], parts["embeddings"]["weight"][7:8])[0]
    expected = run.method.net.personal_head(parts["personal_head"], torch.relu(z * (1 + gamma) + beta))
    assert torch.allclose(run.predict(toy.SINGLE), expected, atol=1e-6)


def test_a_client_that_never_took_part_learns_its_class_shares_at_the_end() -> None:
    run = toy.federate(toy.method("gpfl"), rounds=1, cohort=lambda number: ["c0"])
    assert torch.equal(run.own["c4"]["shares"]["classes"], torch.full((10,), 0.1))
    down, data = steps.broadcast(run.method, run.shared, "c4"), toy.batches("c4")
    up, own = steps.personalise(run.method, down, run.own["c4"], data)
    assert up == {} and torch.equal(own["shares"]["classes"], own_shares(data))
    assert tree.same(own["personal_head"], run.own["c4"]["personal_head"])
