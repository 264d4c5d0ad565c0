"""FedBABU: the head keeps its initial values until final personalisation (docs/methods-global.md, "FedBABU")."""

import pytest

from edge_fl.learn import tree
from edge_fl.learn.fit import fit
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy


def test_only_the_extractor_is_sent_and_the_head_never_changes() -> None:
    method = toy.method("fedbabu")
    run = toy.federate(method, rounds=3)
    assert all(down.keys() == {"extractor"} for downs in run.downs for down in downs.values())
    assert all(update.parts.keys() == {"extractor"} for updates in run.updates for update in updates.values())
    assert all(tree.same(shared["head"], method.net.head.init()) for shared in run.history)
    assert not tree.same(run.history[0]["extractor"], run.shared["extractor"])


def test_the_extractor_is_trained_under_that_head() -> None:
    method = toy.method("fedbabu")
    run = toy.federate(method, rounds=1)
    other = toy.method("fedper")  # trains the head too
    assert not tree.same(
        run.updates[0]["c0"].parts["extractor"],
        toy.federate(other, rounds=1).updates[0]["c0"].parts["extractor"],
    )


@pytest.mark.parametrize(
    ("scope", "moved"), [("full", {"extractor", "head"}), ("head", {"head"}), ("body", {"extractor"})]
)
def test_fine_tuning_changes_the_parts_in_its_scope_and_sends_nothing(scope: str, moved: set[str]) -> None:
    method = toy.method("fedbabu", ft_scope=scope)
    shared = toy.federate(method).shared
    up, own = steps.personalise(method, steps.broadcast(method, shared, "c0"), {}, toy.batches(round=2))
    assert up == {}
    assert moved == {
        name for name in ("extractor", "head") if not tree.same(own[f"tuned_{name}"], shared[name])
    }


def test_before_fine_tuning_the_personal_model_is_the_global_one() -> None:
    run = toy.federate(toy.method("fedbabu"))
    x = toy.batches("c1").x[:5].float() / 255
    down = steps.broadcast(run.method, run.shared, "c1")
    assert steps.predict(run.method, down, run.own["c1"], x).equal(
        steps.predict_global(run.method, run.shared, x)
    )


def test_a_frozen_extractor_is_in_inference_behaviour() -> None:
    method = toy.method("fedbabu", ft_scope="head")
    shared = toy.federate(method).shared
    _, own = steps.personalise(method, steps.broadcast(method, shared, "c0"), {}, toy.batches(round=2))
    z = toy.batches(round=2).features(method.net.extractor, shared["extractor"])
    optimiser = toy.Sgd(method.ft_lr, momentum=0.9)
    head = fit(method.head_loss, shared["head"], z, stage="ft", epochs=method.ft_epochs, optimiser=optimiser)
    assert own["tuned_head"]["weight"].allclose(head["weight"], atol=1e-6)
