"""FedETF: a fixed frame as the head of all clients (docs/methods-global.md, "FedETF"). Balanced loss: see test_losses.py."""

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.methods.contract import steps
from edge_fl.methods.fedetf import simplex_etf
from tests.edge_fl.methods import toy


def test_the_frame_has_unit_columns_at_equal_angles() -> None:
    frame = toy.method("fedetf").net.head.init()["weight"].T
    gram = frame.T @ frame
    assert frame.shape == (12, 10)
    assert torch.allclose(gram.diagonal(), torch.ones(10), atol=1e-6)
    assert torch.allclose(gram[~torch.eye(10, dtype=torch.bool)], torch.full((90,), -0.111111), atol=1e-6)


def test_the_projection_widens_features_that_are_fewer_than_the_classes() -> None:
    few = toy.build_net(toy.ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 4}), toy.INPUT, 10, 0)
    method = toy.method("fedetf", few)
    assert method.net.head.init()["weight"].shape == (10, 10)
    run = toy.federate(method, rounds=1)
    assert run.predict("c0").shape == (20, 10)


def test_the_frame_is_constant_and_not_sent_while_extractor_projection_and_scale_are() -> None:
    run = toy.federate(toy.method("fedetf"))
    sent = {"extractor", "projection", "scale"}
    assert all(update.parts.keys() == sent for updates in run.updates for update in updates.values())
    assert all(down.keys() == sent for downs in run.downs for down in downs.values())
    assert all(tree.same(shared["head"], toy.method("fedetf").net.head.init()) for shared in run.history)
    assert all(not tree.same(run.shared[name], run.history[0][name]) for name in sent)
    assert toy.count(run.updates[0]["c0"].parts["scale"]) == 1


def test_the_scale_starts_at_its_hyper_parameter_and_stays_positive() -> None:
    run = toy.federate(toy.method("fedetf", scale=2.0), rounds=3)
    assert run.history[0]["scale"]["s"] == 2
    assert all(shared["scale"]["s"] > 0 for shared in run.history)


def test_a_class_that_a_client_does_not_have_does_not_push_its_features_away() -> None:
    """With one class alone the balanced softmax is certain whatever the logits are, so nothing moves."""
    method = toy.method("fedetf", toy.net(norm=False))
    down = steps.broadcast(method, steps.start(method), toy.SINGLE)
    assert tree.same(method.local_update(down, {}, toy.batches(toy.SINGLE))[0], down)


def test_final_personalisation_trains_a_copy_of_the_frame_per_client() -> None:
    method = toy.method("fedetf")
    down = steps.broadcast(method, steps.start(method), "c1")
    up, own = steps.personalise(method, down, {}, toy.batches("c1"))
    assert up == {}
    assert not tree.same(own["personal_head"], method.net.head.init())
    trained = method.local_update(down, {}, toy.batches("c1"))[0]
    assert tree.same(own["personal_extractor"], trained["extractor"])
    assert not tree.same(own["personal_projection"], trained["projection"])
    plain = toy.method("fedetf", alternations=0)
    _, own = steps.personalise(plain, down, {}, toy.batches("c1"))
    assert tree.same(own["personal_projection"], trained["projection"])
    assert tree.same(own["personal_head"], method.net.head.init())


@pytest.mark.parametrize("frozen", ["frame_lr", "projection_lr"])
def test_what_has_no_learning_rate_stays(frozen: str) -> None:
    method = toy.method("fedetf", alternations=1, **{frozen: 0.0})
    down = steps.broadcast(method, steps.start(method), "c1")
    _, own = steps.personalise(method, down, {}, toy.batches("c1"))
    trained = method.local_update(down, {}, toy.batches("c1"))[0]
    assert tree.same(own["personal_head"], method.net.head.init()) == (frozen == "frame_lr")
    assert tree.same(own["personal_projection"], trained["projection"]) == (frozen == "projection_lr")


def test_a_frame_of_any_size_has_unit_columns_at_equal_angles() -> None:
    frame = simplex_etf(torch.randn(64, 10, generator=torch.Generator().manual_seed(0)))
    gram = frame.T @ frame
    assert torch.allclose(gram.diagonal(), torch.ones(10), atol=1e-6)
    assert torch.allclose(gram[~torch.eye(10, dtype=torch.bool)], torch.full((90,), -0.111111), atol=1e-6)
    assert torch.allclose(frame.sum(1), torch.zeros(64), atol=1e-6)
