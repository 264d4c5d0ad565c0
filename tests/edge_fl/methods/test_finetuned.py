"""Fine-tuning of a global model (docs/methods-global.md, "FedAvg+FT" and G17)."""

from dataclasses import replace
from inspect import isfunction

import pytest

from edge_fl.errors import MethodError
from edge_fl.learn import tree
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.methods.contract.tiers import head_plan
from edge_fl.methods.fedavg import FedAvg
from edge_fl.methods.finetuned import FineTuned
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


@pytest.mark.parametrize("name", ["ditto+ft", "pfedme+ft", "fedkd+ft", "fedamp+ft"])
def test_a_method_that_predicts_with_a_model_of_its_own_cannot_be_tuned(name: str) -> None:
    with pytest.raises(MethodError, match=rf"{name[:-3]}\+ft'.*predict with a model of their own"):
        toy.method(name)


def test_it_sends_and_packs_as_the_inner_method_and_is_vectorised_like_it() -> None:
    plain, method = toy.method("fedpac"), toy.method("fedpac+ft")
    assert (method.sent(), method.vectorises) == (plain.sent(), True)
    assert not toy.method("fedala+ft").vectorises
    sent = [toy.federate(one, rounds=1).updates[0][toy.SINGLE].parts for one in (plain, method)]
    assert sent[0]["prototypes"]["mean"].shape == sent[1]["prototypes"]["mean"].shape == (1, 12)


def test_the_head_gets_at_least_as_many_steps_as_repper_s_unless_there_are_no_epochs() -> None:
    def head(**options: float) -> Parts:
        return tuned(toy.federate(toy.method("fedavg+ft", **options), rounds=1))

    assert tree.same(head(), head(ft_epochs=60, ft_steps=0))  # 37 samples, 5 batches per epoch
    assert not tree.same(head(), head(ft_steps=0))
    assert tree.same(head(ft_epochs=70), head(ft_epochs=70, ft_steps=0))
    plan = head_plan(toy.method("fedavg+ft"), batch_size=8)
    assert (plan.epochs, plan.min_steps, plan.lr) == (10, 300, 0.1)


DECLARED = [name for name, kind in Method.__annotations__.items() if kind.startswith("ClassVar")]
OWN = {"citation", "family", "grid", "head_tier"}
STEPS = [name for name, value in vars(Method).items() if isfunction(value) and not name.startswith("_")]
OWN_STEPS = {"at", "personalise", "predict", "head_updates"}


@pytest.mark.parametrize("name", DECLARED)
def test_what_a_method_declares_is_what_its_fine_tuned_variant_declares(name: str) -> None:
    plain = toy.method("fedavg")
    given = plain.batch_norm if name == "batch_norm" else plain.parts if name == "parts" else object()
    other = replace(toy.method("fedavg+ft"), inner=type("Other", (FedAvg,), {name: given})(plain.net))
    expected = f"{given}+FT" if name == "title" else vars(FineTuned)[name] if name in OWN else given
    assert getattr(other, name) == expected


@pytest.mark.parametrize("name", sorted({*STEPS} - OWN_STEPS))
def test_a_step_of_a_method_is_that_of_its_fine_tuned_variant(name: str) -> None:
    plain, answer = toy.method("fedavg"), object()
    inner = type("Other", (FedAvg,), {name: lambda self, *given, **named: (answer, given, named)})(plain.net)
    given = ("a",) * (getattr(Method, name).__code__.co_argcount - 1)
    assert getattr(replace(toy.method("fedavg+ft"), inner=inner), name)(*given) == (answer, given, {})
