"""LP-FT: the head first, then the whole model (docs/methods-global.md, "LP-FT")."""

import torch
from torch import nn
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy


def test_training_is_fedavgs() -> None:
    run, plain = toy.federate(toy.method("lp-ft")), toy.federate(toy.method("fedavg"))
    assert tree.same(run.shared, plain.shared)


def test_the_final_personalisation_equals_a_plain_loop() -> None:
    method = toy.method("lp-ft", lp_epochs=2, lp_lr=0.1, ft_epochs=2, ft_lr=0.02)
    run, data = toy.federate(method), toy.batches(round=2)
    extractor, head = (toy.module_of(method.net.parts[n], run.shared[n]) for n in ("extractor", "head"))
    extractor.eval()
    optimiser = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    for batch in data.batches("s1", 2):
        optimiser.zero_grad()
        F.cross_entropy(head(extractor(batch.x).detach()), batch.y).backward()
        optimiser.step()
    model = nn.Sequential(extractor.train(), head)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for batch in data.batches("ft", 2, norm=True):
        optimiser.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimiser.step()
    down = steps.broadcast(method, run.shared, "c0")
    up, own = steps.personalise(method, down, run.own["c0"], data)
    assert up == {}
    assert toy.same_as(own["tuned_extractor"], extractor, 1e-5) and toy.same_as(own["tuned_head"], head, 1e-5)
    x = run.images("c0")
    assert torch.allclose(steps.predict(method, down, own, x), model.eval()(x), atol=1e-4)
    assert torch.equal(run.predict("c0"), method.classify(run.shared, x))


def test_without_the_second_step_the_extractor_stays() -> None:
    method = toy.method("lp-ft", ft_epochs=0)
    run = toy.federate(method)
    down = steps.broadcast(method, run.shared, "c0")
    _, own = steps.personalise(method, down, run.own["c0"], toy.batches(round=2))
    assert tree.same(own["tuned_extractor"], run.shared["extractor"])
    assert not tree.same(own["tuned_head"], run.shared["head"])
