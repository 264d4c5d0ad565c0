"""RepPer: a representation that is learnt together by contrast, heads that are fitted alone (METHODS.md 3.5). L_in: test_losses.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.tree import Parts
from edge_fl.methods import repper, steps
from edge_fl.methods.method import Method
from tests.edge_fl.methods import toy


def trained(method: Method, data: Batches) -> Parts:
    return method.local_update(steps.start(method), {}, data)[0]


def test_only_the_extractor_travels_without_labels_features_or_heads() -> None:
    run = toy.federate(toy.method("repper"))
    for updates in run.updates:
        for update in updates.values():
            assert {name for name, params in update.parts.items() if params} == {"extractor"}
    assert all(own == {} for own in run.own.values())


def test_every_anchor_has_a_positive_its_own_other_view(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = repper.supcon_in

    def watched(z: torch.Tensor, y: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append((z.detach(), y))
        return original(z, y, *rest)

    monkeypatch.setattr(repper, "supcon_in", watched)
    method = toy.method("repper")
    trained(method, toy.batches(toy.PAIR))  # two samples of two classes
    for z, y in seen:
        assert len(y) == 2 * len(y.unique()) == len(z)
        assert y[: len(y) // 2].equal(y[len(y) // 2 :])
        assert torch.allclose(z.norm(dim=1), torch.ones(len(z)))
        assert not z[: len(z) // 2].allclose(z[len(z) // 2 :])  # two views, not one twice


def test_features_have_length_one() -> None:
    run = toy.federate(toy.method("repper"), rounds=1)
    z = run.method.features(run.shared, toy.batches().x.float() / 255)
    assert torch.allclose(z.norm(dim=1), torch.ones(len(z)))
    assert run.method.unit_norm


@pytest.mark.parametrize("head", ["mlp", "svm", "logistic"])
def test_fitting_a_head_leaves_the_extractor_as_it_is_and_sends_nothing(head: str) -> None:
    run = toy.federate(toy.method("repper", head=head), rounds=1)
    down = steps.broadcast(run.method, run.shared, "c0")
    before = tree.clone(down)
    up, own = steps.personalise(run.method, down, {}, toy.batches())
    assert up == {}
    assert own.keys() == {"head"}
    assert tree.same(down, before)


def test_other_names_for_the_classes_change_nothing() -> None:
    method, data = toy.method("repper"), toy.batches()
    renamed = replace(data, y=(data.y * 3 + 7) % 10)  # a permutation of 0 to 9
    assert tree.same(trained(method, data), trained(method, renamed))
    assert not tree.same(trained(method, data), trained(method, replace(data, y=data.y % 2)))


def test_the_loss_is_where_the_option_says() -> None:
    inside, out = (trained(toy.method("repper", supcon=where), toy.batches()) for where in ("in", "out"))
    assert not tree.same(inside, out)


def test_a_projection_is_for_training_only() -> None:
    run = toy.federate(toy.method("repper", proj_dim=5), rounds=1)
    assert run.shared["projection"]
    assert run.method.features(run.shared, toy.batches().x[:2].float() / 255).shape == (2, 12)
    assert not toy.federate(toy.method("repper"), rounds=1).shared["projection"]


def test_views_come_from_the_batchs_key_alone() -> None:
    method, data = toy.method("repper"), toy.batches()
    assert tree.same(trained(method, data), trained(method, data))
    batch = next(data.batches("train", 1))
    assert isinstance(batch, Batch)
    assert not tree.same(trained(method, data), trained(toy.method("repper", augment="gentle"), data))
