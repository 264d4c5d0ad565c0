"""FedCP: the policy splits every feature between two heads (docs/methods-personal-heads.md, "FedCP"). MMD: see test_losses.py."""

import pytest
import torch

from edge_fl.config import ModelConfig
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.methods.contract import steps
from edge_fl.models import build_net
from tests.edge_fl.methods import toy


def test_what_one_head_gets_the_other_does_not() -> None:
    """With equal heads the shares must add up to z: h(a z) + h(b z) = W z + 2 bias only if a + b = 1."""
    method = toy.method("fedcp")
    down, own = steps.start(method), steps.start_own(method, "c0")
    head, x = {"head": down["head"], "personal_head": down["head"]}, toy.batches().x[:6].float() / 255
    z = method.features(down, x)
    expected = z @ down["head"]["weight"].T + 2 * down["head"]["bias"]
    assert method.predict({**down, **own, **head}, x).allclose(expected, atol=1e-5)
    noisy = method._logits(
        {**down, **own, **head}, z, torch.randn(6, 2, 12, generator=torch.Generator().manual_seed(0))
    )
    assert noisy.allclose(expected, atol=1e-5)


def test_the_personal_head_is_sent_only_half_way_to_the_global_one() -> None:
    run = toy.federate(toy.method("fedcp"))
    for id, update in run.updates[1].items():
        received, mine = run.downs[1][id]["head"], run.own[id]["personal_head"]
        assert update.parts.keys() == {"extractor", "policy", "head"}
        assert update.parts["head"]["weight"].allclose((received["weight"] + mine["weight"]) / 2)
        assert not tree.same(update.parts["head"], mine)


def test_the_context_is_random_by_client_then_the_sum_of_the_heads_rows() -> None:
    method = toy.method("fedcp")
    start = {id: steps.start_own(method, id)["context"]["v"] for id in ("c0", "c1")}
    assert not start["c0"].equal(start["c1"])
    assert ((start["c0"] >= 0) & (start["c0"] < 1)).all()
    run = toy.federate(method, rounds=1)
    assert run.own["c0"]["context"]["v"].equal(run.own["c0"]["personal_head"]["weight"].sum(0))


def test_only_the_direction_of_the_context_counts() -> None:
    run = toy.federate(toy.method("fedcp"))
    down, own = steps.broadcast(run.method, run.shared, "c0"), run.own["c0"]
    x = toy.batches().x[:4].float() / 255
    longer = {**own, "context": {"v": 7 * own["context"]["v"]}}
    turned = {**own, "context": {"v": own["context"]["v"].flip(0)}}
    assert steps.predict(run.method, down, longer, x).allclose(
        steps.predict(run.method, down, own, x), atol=1e-5
    )
    assert not steps.predict(run.method, down, turned, x).allclose(steps.predict(run.method, down, own, x))


def test_gumbel_noise_is_for_training_only() -> None:
    plain, noisy = (toy.federate(toy.method("fedcp", gumbel=gumbel), rounds=1) for gumbel in (False, True))
    assert not tree.same(plain.shared["extractor"], noisy.shared["extractor"])
    assert noisy.predict("c0").equal(noisy.predict("c0"))


def test_the_mmd_term_holds_features_near_those_received() -> None:
    method = toy.method("fedcp", toy.flat_net())
    x = toy.batches().x.float() / 255
    moved = []
    for lam in (0.0, 1.0):
        method = toy.method("fedcp", toy.flat_net(), lam=lam, epochs=5)
        down = steps.start(method)
        up, _ = method.local_update(down, steps.start_own(method, "c0"), toy.batches())
        moved.append(float((method.features(up, x).mean(0) - method.features(down, x).mean(0)).norm()))
    assert moved[1] < 0.7 * moved[0]


def test_it_has_the_papers_number_of_parameters() -> None:
    net = build_net(ModelConfig("cnn2-bn"), InputSpec((3, 64, 64)), 10)
    shared = steps.start(toy.method("fedcp", net))
    assert sum(t.numel() for t in tree.parameters(shared).values()) == 6_124_682
    assert (
        sum(t.numel() for t in tree.parameters(steps.start(toy.method("fedavg", net))).values()) == 5_597_322
    )


@pytest.mark.parametrize("width", [5, 12])
def test_the_policy_splits_every_feature_in_two(width: int) -> None:
    method = toy.method("fedcp", build_net(ModelConfig("cnn-tiny", {"feature_dim": width}), toy.INPUT, 10))
    scores = method.net.policy(method.net.policy.init(), torch.ones(3, width))
    assert scores.shape == (3, 2, width)
    assert (scores >= 0).all()
