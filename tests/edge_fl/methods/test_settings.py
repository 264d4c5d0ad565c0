"""Settings of every method: augmentation of training images, a projector behind the extractor, another BatchNorm policy."""

from typing import Any, get_args

import pytest
import torch

from edge_fl.config import Augment, BatchNormPolicy, MethodConfig, MethodSpec, ModelConfig, OptimiserConfig
from edge_fl.learn import tree
from edge_fl.learn.augment import AUGMENTATIONS
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods import METHODS, build, build_method
from edge_fl.methods.contract import norm, steps
from edge_fl.methods.contract.method import BatchNorm, Method
from edge_fl_server.release import export
from edge_fl_server.training.engines.vector import VectorClients
from tests.edge_fl.methods import toy


def method(name: str = "fedavg", **settings: Any) -> Method:
    config = MethodConfig(name, 1, 8, OptimiserConfig("sgd", 0.05), **settings)
    model = ModelConfig("cnn-tiny", {"feature_dim": 12, "width": 4})
    return build_method(MethodSpec(model, toy.INPUT, [str(label) for label in range(10)], config, 0))


def sent(ours: Method) -> Parts:
    return toy.federate(ours, rounds=1).updates[0]["c0"].parts


def test_a_method_trains_one_epoch_unless_another_number_is_given() -> None:
    assert build("fedavg", toy.net(), optimiser=Sgd(0.1)).epochs == 1


def test_the_words_are_those_of_the_code() -> None:
    assert set(get_args(Augment)) == AUGMENTATIONS.keys()
    assert set(get_args(BatchNormPolicy)) == {"", *(policy.value for policy in BatchNorm)}


def test_training_images_are_augmented_and_test_images_and_frozen_features_are_not() -> None:
    plain, changed = method(), method(augment="flip-rotate")
    assert not tree.same(sent(plain), sent(changed))
    assert tree.same(sent(changed), sent(method(augment="flip-rotate")))
    client = toy.clients()["c0"]
    data = client.training_batches(changed, 1)
    first, same = (
        next(batches.batches("train", 1)).x for batches in (data, client.training_batches(plain, 1))
    )
    assert first.shape == same.shape and not first.equal(same)
    net = plain.net
    assert data.features(net.extractor, net.extractor.init()).x.equal(
        client.batches(1).features(net.extractor, net.extractor.init()).x
    )
    down, own = steps.broadcast(changed, steps.start(changed), "c0"), steps.start_own(changed, "c0")
    assert client.evaluate(changed, down, own) == client.evaluate(plain, down, own)


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_a_vectorised_chunk_sees_the_same_views(name: str) -> None:
    ours = method(name, augment="flip-rotate")
    down = steps.broadcast(ours, steps.start(ours), "")
    run = toy.federate(ours, rounds=1)
    fleet = VectorClients(toy.clients(), ours, chunk=3)
    found = {
        update.client: update.parts
        for update in fleet.each("train", 1, ours, dict.fromkeys(toy.clients(), down))
    }
    assert not fleet.fallback
    for client, update in run.updates[0].items():
        expected, got = tree.leaves(update.parts), tree.leaves(found[client])
        assert all(torch.allclose(got[path].float(), t.float(), atol=1e-4) for path, t in expected.items())


@pytest.mark.parametrize("name", ["fedper", "fedrir", "fedproto"])
def test_a_projector_joins_the_extractor(name: str) -> None:
    ours, plain = method(name, projector=True), method(name)
    added = [tuple(t.shape) for t in (ours.net.extractor.init() | plain.net.extractor.init()).values()]
    assert (6, 12) in added and (12, 6) in added
    run = toy.federate(ours)
    assert run.predict("c0").isfinite().all()
    if ours.exports:
        export.export(ours, run.shared)  # raises where onnxruntime and torch differ


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_accepts_another_batchnorm_policy(name: str) -> None:
    run = toy.federate(method(name, batch_norm="local_stats"))
    running = [
        path for parts in run.downs[-1].values() for path in tree.leaves(parts) if "running_" in path[-1]
    ]
    assert not running
    assert run.method.at(3).batch_norm is BatchNorm.LOCAL_STATS
    if run.method.predicts_early:
        assert run.predict("c0").isfinite().all()


def test_fedbn_s_policy_makes_fedavg_fedbn_but_for_the_weights() -> None:
    ours, fedbn = method(batch_norm="local_bn"), method("fedbn", options={"weighting": "n"})
    assert tree.same(toy.federate(ours).shared, toy.federate(fedbn).shared)
    assert norm.kept(ours, "extractor")
