"""APFL: a mixture of an own model and the shared one (docs/methods-personal-models.md, "APFL")."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from edge_fl.errors import MethodError
from edge_fl.learn import tree
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.apfl import mixed
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import scalar, toy

MODEL = ("extractor", "head")


def own(v: float, alpha: float, trained: float = 1.0) -> Parts:
    history = {"trained": torch.tensor(trained), "alpha": torch.tensor(alpha)}
    return {**tree.prefixed("personal_", scalar.parts(v)), "history": history}


def alpha_of(parts: Parts) -> float:
    return float(parts["history"]["alpha"])


def test_one_step_on_a_quadratic() -> None:
    method = scalar.method("apfl", lambda w, batch: 0.5 * w**2, Sgd(0.1))
    up, new = method.local_update(scalar.parts(2.0), own(1.0, 0.5), scalar.batches(1))
    assert scalar.value(up) == pytest.approx(1.8)
    assert scalar.value(new, "personal_extractor") == pytest.approx(0.93)  # 1 - 0.1 * 0.5 * 1.4
    assert alpha_of(new) == pytest.approx(0.612)  # 0.5 - 0.1 * 1.4 * (1 - 1.8)
    fixed = scalar.method("apfl", lambda w, batch: 0.5 * w**2, Sgd(0.1), adaptive=False)
    _, new = fixed.local_update(scalar.parts(2.0), own(1.0, 0.5), scalar.batches(1))
    assert scalar.value(new, "personal_extractor") == pytest.approx(0.93) and alpha_of(new) == 0.5


@pytest.mark.parametrize(("w", "v", "expected"), [(11.0, 2.0, 1.0), (2.0, 9.0, 0.0)])
def test_the_weight_stays_between_0_and_1(w: float, v: float, expected: float) -> None:
    method = scalar.method("apfl", lambda w, batch: 50.0 * (w - 1) ** 2, Sgd(0.001))
    _, new = method.local_update(scalar.parts(w), own(v, 0.5), scalar.batches(1))
    assert alpha_of(new) == expected


def test_a_first_participation_starts_from_what_is_received() -> None:
    method = scalar.method("apfl", lambda w, batch: 0.5 * w**2, Sgd(0.1))
    received = scalar.parts(2.0)
    first = method.local_update(received, own(-7.0, 0.5, trained=0.0), scalar.batches(2))[1]
    again = method.local_update(received, own(2.0, 0.5), scalar.batches(2))[1]
    assert tree.same(first, again)


def test_an_update_equals_a_plain_loop_with_batchnorm_of_the_mixture() -> None:
    method = toy.method("apfl", epochs=2, optimiser=Sgd(0.1))
    run = toy.federate(method, rounds=1)
    down, mine = steps.broadcast(method, run.shared, "c0"), run.own["c0"]
    w = {name: toy.module_of(method.net.parts[name], down[name]) for name in MODEL}
    v = {name: toy.module_of(method.net.parts[name], mine[f"personal_{name}"]) for name in MODEL}
    alpha = mine["history"]["alpha"].clone().requires_grad_()
    optimisers = [
        torch.optim.SGD([t for module in each.values() for t in module.parameters()], lr=0.1)
        for each in (w, v)
    ]
    for batch in toy.batches(round=2).batches("train", 2, norm=True):
        optimisers[0].zero_grad()
        F.cross_entropy(w["head"](w["extractor"](batch.x)), batch.y).backward()
        optimisers[0].step()
        optimisers[1].zero_grad()
        x = batch.x
        for name in MODEL:
            common = {key: t.detach() for key, t in w[name].named_parameters()}
            both = {key: alpha * t + (1 - alpha) * common[key] for key, t in v[name].named_parameters()}
            x = functional_call(v[name], both, (x,))
        alpha.grad = None
        F.cross_entropy(x, batch.y).backward()
        optimisers[1].step()
        with torch.no_grad():
            alpha.sub_(0.1 * alpha.grad).clamp_(0, 1)
    up, new = method.local_update(down, mine, toy.batches(round=2))
    assert all(toy.same_as(up[name], w[name]) for name in MODEL)
    assert all(toy.same_as(new[f"personal_{name}"], v[name], atol=1e-5) for name in MODEL)
    assert alpha_of(new) == pytest.approx(float(alpha.detach()), abs=1e-5)


def test_the_shared_model_takes_fedavgs_path() -> None:
    found, expected = (toy.federate(toy.method(name)).shared for name in ("apfl", "fedavg"))
    for path, tensor in tree.parameters(expected).items():
        assert torch.allclose(tensor, tree.parameters(found)[path], atol=1e-6), path


def test_clients_predict_with_the_mixture_and_those_who_never_trained_with_the_received_model() -> None:
    run = toy.federate(toy.method("apfl"), cohort=lambda number: ["c0", "c1"])
    of_w = steps.predict_global(run.method, run.shared, run.images("c4"))
    assert run.predict("c4").equal(of_w)
    w = {name: run.shared[name] for name in MODEL}
    mixture = mixed(tree.unprefixed("personal_", run.own["c0"]), w, run.own["c0"]["history"]["alpha"])
    assert run.predict("c0").equal(run.method.classify(mixture, run.images("c0")))
    assert not run.predict("c0").allclose(steps.predict_global(run.method, run.shared, run.images("c0")))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_ends_are_the_shared_model_and_an_own_one(alpha: float) -> None:
    method = toy.method("apfl", alpha=alpha, adaptive=False)
    run = toy.federate(method)
    w = run.shared if alpha == 0 else tree.unprefixed("personal_", run.own["c0"])
    model = {name: tree.parameters(w[name]) for name in MODEL}
    parts = {**run.own["c0"], **{name: run.shared[name] for name in MODEL}}
    found = mixed(tree.unprefixed("personal_", parts), {n: parts[n] for n in MODEL}, torch.tensor(alpha))
    for name in MODEL:
        for (key,), tensor in model[name].items():
            assert torch.allclose(found[name][key], tensor, atol=1e-6)


def test_the_weight_is_measured_and_fine_tuning_refused() -> None:
    run = toy.federate(toy.method("apfl", alpha=0.25))
    down = steps.broadcast(run.method, run.shared, "c0")
    measured = steps.measure(run.method, down, run.own["c0"], toy.batches())
    assert measured == {"apfl.alpha": pytest.approx(alpha_of(run.own["c0"]))}
    assert measured["apfl.alpha"] != 0.25
    with pytest.raises(MethodError, match="predict with a model of their own"):
        toy.method("apfl+ft")
