"""MOON: contrast between global and previous features (docs/methods-global.md, "MOON")."""

import pytest
import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.losses import model_contrast
from edge_fl.methods.contract import steps
from edge_fl_server.release import export
from tests.edge_fl.methods import toy

RIGHT, UP = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])


@pytest.mark.parametrize(
    ("near", "far", "expected"), [(RIGHT, RIGHT, 0.693147), (RIGHT, UP, 0.126928), (UP, RIGHT, 2.126928)]
)
def test_the_contrast_has_the_papers_values(near: Tensor, far: Tensor, expected: float) -> None:
    assert float(model_contrast(3 * RIGHT, near, far, 0.5)) == pytest.approx(expected, abs=1e-6)
    masked = model_contrast(
        RIGHT.repeat(2, 1), near.repeat(2, 1), torch.cat([far, -far]), 0.5, torch.tensor([1.0, 0.0])
    )
    assert float(masked) == pytest.approx(expected, abs=1e-6)


def test_equal_references_have_no_slope() -> None:
    z = torch.tensor([[0.3, -0.7]], requires_grad=True)
    model_contrast(z, UP, UP, 0.5).backward()
    assert z.grad is not None
    assert z.grad.abs().max() < 1e-7


def test_the_first_participation_is_fedavgs_whenever_it_comes() -> None:
    method, plain = toy.method("moon", moon_proj=0), toy.method("fedavg")
    shared = toy.federate(
        plain, rounds=2
    ).shared  # c0 comes in a later round, when w is no longer where it began
    down = {**shared, "projection": {}}
    up, _ = toy.train(method, down, steps.start_own(method, "c0"), toy.batches(round=3))
    expected, _ = toy.train(plain, shared, {}, toy.batches(round=3))
    for path, tensor in tree.parameters(expected).items():
        assert torch.allclose(tensor, tree.parameters(up)[path], atol=1e-6), path


def test_later_ones_are_not_and_remember_the_model_that_was_trained() -> None:
    run = toy.federate(toy.method("moon", moon_proj=256))
    for name in ("extractor", "projection"):
        assert tree.same(run.own["c0"][f"previous_{name}"], run.updates[1]["c0"].parts[name])
    assert not tree.same(
        run.shared["extractor"], toy.federate(toy.method("moon", mu=0.0, moon_proj=256)).shared["extractor"]
    )


def test_its_pull_is_towards_the_global_features() -> None:
    """With nothing but the contrast, features come nearer to the global ones and leave the previous ones."""
    strong, weak = (toy.method("moon", toy.flat_net(), mu=mu, epochs=3, moon_proj=0) for mu in (200.0, 0.01))
    other = toy.federate(toy.method("fedavg", toy.flat_net(seed=1))).shared
    found = []
    for method in (strong, weak):
        own = {**steps.start_own(method, "c0"), "history": {"trained": torch.ones(())}}
        own = {**own, "previous_extractor": other["extractor"]}
        down = steps.start(method)
        up, _ = method.local_update(down, own, toy.batches())
        x = toy.batches().x.float() / 255
        z, near, far = (method.features(p, x) for p in (up, down, tree.unprefixed("previous_", own)))
        found.append(float(model_contrast(z, near, far, 0.5)))
    assert found[0] < found[1] - 0.1


def test_with_a_projection_the_head_reads_it_and_the_export_has_it() -> None:
    assert steps.start(toy.method("moon", moon_proj=256))["head"]["weight"].shape == (
        toy.CLASSES,
        256,
    )  # the published network
    method = toy.method("moon", moon_proj=5)
    run = toy.federate(method, rounds=1)
    assert run.shared["head"]["weight"].shape == (toy.CLASSES, 5)
    assert run.shared["projection"]
    assert export.export(method, run.shared).feature_dim == 5
