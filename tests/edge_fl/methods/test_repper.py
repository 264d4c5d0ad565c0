"""RepPer: a shared contrastive representation, and a head per client (docs/methods-personal-heads.md, "RepPer")."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from edge_fl import heads
from edge_fl.learn import tree
from edge_fl.learn.augment import AUGMENTATIONS
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import supcon, supcon_in, unit
from edge_fl.learn.pictures import pixels
from edge_fl.learn.random import fold
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from tests.edge_fl.methods import toy


def trained(method: Method, data: Batches) -> Parts:
    return method.local_update(steps.start(method), {}, data)[0]


def test_only_the_extractor_is_sent_without_labels_features_or_heads() -> None:
    run = toy.federate(toy.method("repper"))
    for updates in run.updates:
        for update in updates.values():
            assert {name for name, params in update.parts.items() if params} == {"extractor"}
    assert all(own == {} for own in run.own.values())


@pytest.mark.parametrize("where", ["in", "out"])
def test_stage_one_contrasts_two_views_so_that_every_anchor_has_a_positive(where: str) -> None:
    method, view, data = (
        toy.method("repper", supcon=where, augment="supcon"),
        AUGMENTATIONS["supcon"],
        toy.batches(toy.PAIR),
    )

    def loss(f: Params, batch: Batch) -> Tensor:
        views = [view(batch.x, fold(batch.key, number)) for number in (1, 2)]
        assert not torch.equal(*views)
        y = batch.y.repeat(2)
        assert (
            (y[:, None] == y[None, :]).sum(1) == 2
        ).all()  # two samples of two classes: itself and its other view
        u = unit(method.net.extractor(f, torch.cat(views)))
        return (supcon_in if where == "in" else supcon)(u, y, 0.1)

    start = steps.start(method)["extractor"]
    expected = fit(loss, start, data, stage="train", epochs=1, optimiser=method.optimiser)
    assert tree.same(trained(method, data)["extractor"], expected)
    assert not tree.same(expected, start)


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


def test_the_option_selects_the_loss() -> None:
    inside, out = (trained(toy.method("repper", supcon=where), toy.batches()) for where in ("in", "out"))
    assert not tree.same(inside, out)


@pytest.mark.parametrize(("where", "contrast"), [("in", supcon_in), ("out", supcon)])
def test_several_positives_are_averaged_inside_or_outside_of_the_logarithm(
    where: str, contrast: Callable[..., Tensor]
) -> None:
    method, data = toy.method("repper", supcon=where, augment="gentle"), toy.batches()

    def loss(f: Params, batch: Batch) -> Tensor:
        views = torch.cat([AUGMENTATIONS["gentle"](batch.x, fold(batch.key, number)) for number in (1, 2)])
        return contrast(unit(method.net.extractor(f, views)), batch.y.repeat(2), 0.1)

    start = steps.start(method)["extractor"]
    expected = fit(loss, start, data, stage="train", epochs=1, optimiser=method.optimiser)
    assert tree.same(trained(method, data)["extractor"], expected)


def test_a_projection_is_for_training_only() -> None:
    run, plain = (toy.federate(toy.method("repper", proj_dim=width), rounds=1) for width in (5, 0))
    assert run.shared["projection"]["2.weight"].shape == (5, 12)
    assert not plain.shared["projection"]
    assert not tree.same(run.shared["extractor"], plain.shared["extractor"])
    assert run.method.features(run.shared, toy.batches().x[:2].float() / 255).shape == (2, 12)


def test_a_head_is_what_its_kind_makes_of_the_frozen_unit_features() -> None:
    run = toy.federate(toy.method("repper", head="svm"), rounds=1)
    down = steps.broadcast(run.method, run.shared, "c0")
    run.own["c0"] = steps.personalise(run.method, down, {}, toy.batches())[1]
    train = run.clients["c0"].data.train
    z = run.method.features(run.shared, pixels(torch.from_numpy(train.x))).numpy()
    expected = heads.fit("svm", z, train.y, toy.CLASSES, unit_norm=True)
    found = expected.logits(run.method.features(run.shared, run.images("c0")).numpy())
    assert torch.allclose(run.predict("c0"), torch.from_numpy(found), atol=1e-5)


def test_views_come_from_the_batchs_key_alone() -> None:
    method, data = toy.method("repper"), toy.batches()
    assert tree.same(trained(method, data), trained(method, data))
    batch = next(data.batches("train", 1))
    assert isinstance(batch, Batch)
    assert not tree.same(trained(method, data), trained(toy.method("repper", augment="crop"), data))


def test_grey_images_are_not_mirrored_by_default() -> None:
    data = toy.batches()
    assert tree.same(
        trained(toy.method("repper"), data), trained(toy.method("repper", augment="gentle"), data)
    )
    colour = toy.build_net(toy.ModelConfig("cnn-tiny"), toy.InputSpec((3, 8, 8)), toy.CLASSES)
    coloured = Batches.of(data.x.repeat(1, 3, 1, 1), data.y, classes=toy.CLASSES)
    found = [
        trained(toy.method("repper", colour, augment=name), coloured) for name in ("auto", "supcon", "gentle")
    ]
    assert tree.same(found[0], found[1]) and not tree.same(found[0], found[2])
