"""Fine-tuning of a global model (docs/methods.md, "FedAvg+FT" and G17)."""

from __future__ import annotations

import pytest

from edge_fl.errors import MethodError
from edge_fl.learn import tree
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy

both = pytest.mark.parametrize("name", ["fedavg", "fedprox"])


def tuned(run: toy.Federation, client: str = "c0") -> Parts:
    down = steps.broadcast(run.method, run.shared, client)
    up, own = steps.personalise(run.method, down, run.own[client], toy.batches(client, round=2))
    assert up == {}
    return own


@both
def test_training_is_the_inner_methods_to_the_bit(name: str) -> None:
    assert tree.same(toy.federate(toy.method(f"{name}+ft")).shared, toy.federate(toy.method(name)).shared)


@both
def test_the_extractor_stays_the_global_one(name: str) -> None:
    run = toy.federate(toy.method(f"{name}+ft"))
    own = tuned(run)
    assert own.keys() == {"tuned_head"}
    assert not tree.same(own["tuned_head"], run.shared["head"])


@both
def test_without_epochs_it_predicts_as_the_inner_method(name: str) -> None:
    run, plain = toy.federate(toy.method(f"{name}+ft", ft_epochs=0)), toy.federate(toy.method(name))
    run.own["c0"] = tuned(run)
    assert run.predict("c0").equal(plain.predict("c0"))


def test_in_full_scope_the_extractor_is_tuned_too() -> None:
    run = toy.federate(toy.method("fedavg+ft", ft_scope="full"))
    own = tuned(run)
    assert own.keys() == {"tuned_extractor", "tuned_head"}
    assert not tree.same(own["tuned_extractor"], run.shared["extractor"])


@pytest.mark.parametrize("name", ["local+ft", "fedper+ft", "fedbabu+ft", "repper+ft"])
def test_a_method_that_sends_no_head_cannot_be_tuned_so(name: str) -> None:
    with pytest.raises(MethodError, match="needs a shared extractor and a shared head; nothing was changed"):
        toy.method(name)


def test_a_schedule_reaches_the_inner_method() -> None:
    optimiser = toy.Sgd(0.1, lr_steps=((2, 0.0),))
    run = toy.federate(toy.method("fedavg+ft", optimiser=optimiser))
    before, after = (tree.parameters(shared) for shared in run.history[1:])
    assert all(after[path].equal(t) for path, t in before.items())
