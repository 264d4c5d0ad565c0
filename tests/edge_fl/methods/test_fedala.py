"""FedALA: element-wise weights between the global and the own head are trained (docs/methods-personal-models.md, "FedALA")."""

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.pictures import pixels
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods import fedala
from edge_fl.methods.contract import steps
from edge_fl.methods.fedala import FedALA
from tests.edge_fl.methods import toy


@dataclass(frozen=True)
class Quadratic(FedALA):
    """The head is one number with its minimum at 0.25."""

    def head_loss(self, head: Params, batch: Batch) -> Tensor:
        return 0.5 * (head["w"] - 0.25) ** 2


def trained_to(
    rounds: int, weight: float = 1.0, theirs: float = 1.0, rate: float = 1.0, batch_size: int = 8
) -> float:
    usual = toy.method("fedala", toy.flat_net(), weights_lr=rate)
    method = Quadratic(**{field.name: getattr(usual, field.name) for field in fields(usual)})
    own: Parts = {
        "personal_head": {"w": torch.tensor(0.0)},
        "weights": {"w": torch.tensor(weight)},
        "history": {"rounds": torch.tensor(rounds)},
    }
    down = {"extractor": method.net.extractor.init(), "head": {"w": torch.tensor(theirs)}}
    return float(method._learn_weights(down, own, toy.batches(batch_size=batch_size))["weights"]["w"])


def test_on_a_quadratic_loss_the_weight_converges_to_the_minimum() -> None:
    assert trained_to(2) == pytest.approx(0.25)
    assert trained_to(2, weight=0.25) == pytest.approx(0.25)
    # one batch, from 1 by 0.2 * (2 - 0.25) * (2 - 0)
    assert trained_to(2, theirs=2.0, rate=0.2, batch_size=64) == pytest.approx(0.3)
    assert trained_to(0) == 1.0  # the first participation takes w as it comes


def run(rounds: int = 4, **options: Any) -> toy.Federation:
    return toy.federate(toy.method("fedala", **options), rounds=rounds)


def test_weights_stay_between_zero_and_one_move_and_are_never_sent() -> None:
    after = run(weights_lr=50.0)
    for own in after.own.values():
        assert all(((t >= 0) & (t <= 1)).all() for t in own["weights"].values())
    assert any((t != 1).any() for t in after.own["c0"]["weights"].values())
    assert all(u.parts.keys() == {"extractor", "head"} for updates in after.updates for u in updates.values())


def test_weights_of_one_give_the_global_head_and_zero_the_own_head() -> None:
    after = run(rounds=3)
    x = pixels(torch.from_numpy(after.clients["c0"].data.test.x))
    down, own = steps.broadcast(after.method, after.shared, "c0"), after.own["c0"]
    ones = {**own, "weights": tree.map(torch.ones_like, own["weights"])}
    assert steps.predict(after.method, down, ones, x).equal(after.method.classify(down, x))
    zeros = {**own, "weights": tree.map(torch.zeros_like, own["weights"])}
    mine = {"extractor": down["extractor"], "head": own["personal_head"]}
    assert steps.predict(after.method, down, zeros, x).allclose(after.method.classify(mine, x), atol=1e-6)


def test_the_first_learning_lasts_until_losses_settle_later_ones_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted by the stages that are asked of the data."""
    epochs: dict[int, set[str]] = {}
    whole = Batches.batches

    def counted(self: Batches, stage: str, *rest: Any, **more: Any) -> Any:
        epochs.setdefault(self.round, set()).add(stage)
        return whole(self, stage, *rest, **more)

    monkeypatch.setattr(Batches, "batches", counted)
    toy.federate(toy.method("fedala", first_epochs=30), rounds=3, cohort=lambda number: ["c0"])
    assert [len([s for s in epochs[r] if s.startswith("s1")]) for r in (1, 3)] == [0, 1]
    assert 11 <= len([s for s in epochs[2] if s.startswith("s1")]) <= 30
    epochs.clear()
    toy.federate(toy.method("fedala", first_epochs=12, threshold=0.0), rounds=2, cohort=lambda number: ["c0"])
    assert len([s for s in epochs[2] if s.startswith("s1")]) == 12


def test_local_training_starts_from_the_mixture() -> None:
    after = run(rounds=3, epochs=0)
    for id, own in after.own.items():
        sent = after.updates[2][id].parts["head"]
        assert tree.same(own["personal_head"], sent)
        assert tree.same(after.updates[2][id].parts["extractor"], after.downs[2][id]["extractor"])


def test_the_weights_are_trained_on_a_share_of_the_data() -> None:
    data = toy.batches()
    share = data.sample(0.8, "s1")
    assert len(share) == int(0.8 * len(data))
    rows = {tuple(x.flatten().tolist()) for x in data.x}
    assert {tuple(x.flatten().tolist()) for x in share.x} <= rows
    assert share.x.equal(data.sample(0.8, "s1").x)
    assert not share.x.equal(toy.batches(round=2).sample(0.8, "s1").x)
    assert len(data.sample(0.0, "s1")) == 1


@pytest.mark.parametrize("layers", [2, 99])
def test_with_more_layers_the_extractors_last_ones_are_mixed_too(layers: int) -> None:
    after = run(rounds=3, layers=layers, weights_lr=5.0)
    down, own = steps.broadcast(after.method, after.shared, "c0"), after.own["c0"]
    top = own["personal_extractor"].keys()
    parameters = {name for name in down["extractor"] if not name.startswith("buffer:")}
    assert top == own["extractor_weights"].keys()
    assert (top == parameters) == (layers == 99)
    assert top <= parameters
    assert any((t < 1).any() for t in own["extractor_weights"].values())
    assert all(u.parts.keys() == {"extractor", "head"} for updates in after.updates for u in updates.values())
    x = after.images("c0")
    for value, source in ((0.0, own["personal_extractor"]), (1.0, {})):
        weights = tree.map(lambda t, value=value: torch.full_like(t, value), own["extractor_weights"])
        zeros = tree.map(torch.zeros_like, own["weights"])
        parts = {**own, "extractor_weights": weights, "weights": zeros}
        expected = {"extractor": {**down["extractor"], **source}, "head": own["personal_head"]}
        assert steps.predict(after.method, down, parts, x).allclose(
            after.method.classify(expected, x), atol=1e-5
        )


def test_the_weights_of_more_layers_follow_the_gradient() -> None:
    """One batch: W = 1 - η ∇ℓ(h^t) ⊙ (h^t - h_i), clipped."""
    method = toy.method("fedala", toy.flat_net(), layers=2, share=1.0, weights_lr=0.5)
    down, own = steps.start(method), steps.start_own(method, "c0")
    own["history"] = {"rounds": torch.tensor(2)}
    own["personal_extractor"] = tree.map(lambda t: 2 * t, own["personal_extractor"])
    found = method.personalise(down, own, toy.batches(batch_size=64))[1]["extractor_weights"]
    w = tree.map(lambda t: t.clone().requires_grad_(), down)
    data = toy.batches(batch_size=64)
    torch.nn.functional.cross_entropy(method.classify(w, pixels(data.x)), data.y).backward()
    for name, received in down["extractor"].items():
        expected = (1 - 0.5 * w["extractor"][name].grad * (received - 2 * received)).clamp(0, 1)
        assert torch.allclose(found[name], expected, atol=1e-6)
        assert (expected < 1).any()


def test_weights_of_one_and_zero_keep_the_exact_bits() -> None:
    a, b = {"w": torch.tensor([0.1, 0.7])}, {"w": torch.tensor([5.0, 9.0])}
    assert fedala.mixed({"w": torch.tensor([1.0, 0.0])}, a, b)["w"].equal(torch.tensor([0.1, 9.0]))
