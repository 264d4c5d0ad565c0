"""SCAFFOLD: steps corrected by control variates (docs/methods-global.md, "SCAFFOLD")."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import Batch
from edge_fl.learn.optimiser import Adam, Optimiser, Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import scalar, toy

MODEL = ("extractor", "head")
COHORTS = {1: ["c0", "c1", "c4"], 2: ["c0", "c2"], 3: ["c1", "c3", "c4"], 4: ["c0"]}


def varied(parts: Parts, scale: float) -> Parts:
    """Other values in place of each, as of a client that took part."""
    return {
        name: {key: scale * torch.linspace(-1, 1, t.numel()).view(t.shape) for key, t in params.items()}
        for name, params in parts.items()
    }


def test_a_later_participation_equals_a_plain_loop() -> None:
    method = toy.method("scaffold", epochs=2, optimiser=Sgd(0.1))
    c, c_i = varied(method.net.zeros(), 0.2), varied(method.net.zeros(), -0.1)
    down = {**steps.broadcast(method, steps.start(method), "c0"), **tree.prefixed("control_", c)}
    own = {**tree.prefixed("own_control_", c_i), "history": {"trained": torch.ones(())}}
    modules = {name: toy.module_of(method.net.parts[name], down[name]) for name in MODEL}
    held = {(name, key): t for name, module in modules.items() for key, t in module.named_parameters()}
    start = {path: t.detach().clone() for path, t in held.items()}
    batches = list(toy.batches().batches("train", 2, norm=True))
    for batch in batches:
        logits = modules["head"](modules["extractor"](batch.x))
        grads = torch.autograd.grad(F.cross_entropy(logits, batch.y), list(held.values()))
        with torch.no_grad():
            for ((name, key), t), g in zip(held.items(), grads, strict=True):
                t -= 0.1 * (g - c_i[name][key] + c[name][key])  # Eq. 3
    up, new = method.local_update(down, own, toy.batches())
    assert all(toy.same_as(up[name], module) for name, module in modules.items())
    for (name, key), t in held.items():
        old, common = c_i[name][key], c[name][key]
        expected = old - common + (start[name, key] - t) / (len(batches) * 0.1)  # Eq. 4, option II
        assert torch.allclose(new[f"own_control_{name}"][key], expected, atol=1e-5)
        assert torch.allclose(up[f"control_{name}"][key] - common, expected - old, atol=1e-5)


def ramp(w: Tensor, batch: Batch) -> Tensor:
    """Slope 1 at label 0 and 3 at label 1."""
    return w * (1 + 2 * batch.y.sum())


def numbers(w: float, c: float, c_i: float) -> tuple[Parts, Parts]:
    """(received, own) of a client that took part."""
    down = {**scalar.parts(w), **tree.prefixed("control_", scalar.parts(c))}
    return down, {**tree.prefixed("own_control_", scalar.parts(c_i)), "history": {"trained": torch.ones(())}}


@pytest.mark.parametrize("optimiser", [Sgd(0.1), Sgd(0.1, momentum=0.9), Adam(0.01)], ids=str)
def test_the_control_variate_is_the_mean_gradient_under_any_optimiser(optimiser: Optimiser) -> None:
    method = scalar.method("scaffold", ramp, optimiser)
    up, own = method.local_update(*numbers(1.0, 0.5, 0.25), scalar.batches(2))
    assert scalar.value(own, "own_control_extractor") == pytest.approx(2.0)
    assert scalar.value(up, "control_extractor") == pytest.approx(0.5 + 2.0 - 0.25)
    if optimiser == Sgd(0.1):
        assert scalar.value(up) == pytest.approx(0.55)  # 1 - 0.1 (1 + 3 + 2 * 0.25)


def test_the_first_participation_is_fedavgs_whenever_it_comes() -> None:
    method, plain = toy.method("scaffold"), toy.method("fedavg")
    shared = toy.federate(method).shared
    assert any(t.any() for t in shared["control_extractor"].values())
    down = steps.broadcast(method, shared, "new")
    up, own = toy.train(method, down, steps.start_own(method, "new"), toy.batches(round=3))
    expected, _ = toy.train(plain, {name: down[name] for name in MODEL}, {}, toy.batches(round=3))
    for path, tensor in tree.parameters(expected).items():
        assert torch.allclose(tensor, tree.parameters(up)[path], atol=1e-6), path
    for name in MODEL:  # the server takes the change from c for the whole of c_i
        for key, tensor in own[f"own_control_{name}"].items():
            assert torch.allclose(up[f"control_{name}"][key], tensor, atol=1e-6)


def test_c_is_the_mean_of_the_control_variates_of_all_clients_that_took_part() -> None:
    for number in COHORTS:
        run = toy.federate(toy.method("scaffold"), number, cohort=COHORTS.__getitem__)
        came = sorted({id for earlier in range(1, number + 1) for id in COHORTS[earlier]})
        assert sorted(run.shared["counted"]) == came
        for name in MODEL:
            for key, tensor in run.shared[f"control_{name}"].items():
                own = torch.stack([run.own[id][f"own_control_{name}"][key] for id in came])
                assert torch.allclose(tensor, own.mean(0), atol=1e-5), (number, name, key)


def test_the_server_steps_to_the_plain_mean_of_models_of_any_size() -> None:
    method, name = toy.method("scaffold", server_lr=2.0), "buffer:extractor.convolutions.1.running_var"
    start = steps.start(method)
    old = {part: start[part] for part in method.sends}
    new = tree.map(lambda t: 0.2 * t if t.is_floating_point() else t + 1, old)
    same = {**old, **{part: {key: t.clone() for key, t in old[part].items()} for part in MODEL}}
    after = steps.aggregate(method, start, [Update("c0", 3, new), Update("c1", 500, same)])
    assert after["head"]["weight"].allclose((2 * 0.6 - 1) * old["head"]["weight"])
    assert after["extractor"][name].allclose(0.6 * old["extractor"][name])  # not beyond the mean


def test_a_client_without_a_batch_keeps_its_control_variate_and_changes_nothing() -> None:
    method = toy.method("scaffold")
    c, c_i = varied(method.net.zeros(), 0.2), varied(method.net.zeros(), -0.1)
    down = {**steps.broadcast(method, steps.start(method), "c0"), **tree.prefixed("control_", c)}
    own = {**tree.prefixed("own_control_", c_i), "history": {"trained": torch.ones(())}}
    one = replace(toy.batches(), x=toy.batches().x[:1], y=toy.batches().y[:1])  # BatchNorm needs two
    up, new = method.local_update(down, own, one)
    assert tree.same(up, down) and tree.same(new, own)


@pytest.mark.parametrize("name", ["scaffold", "fedavg"])
def test_clients_of_different_curvature_agree_on_the_minimum_of_the_mean_loss(name: str) -> None:
    """Losses ½ w² and 9/2 (w - 1)², minimum of their mean 0.9; FedAvg stops elsewhere."""
    found = converged(name, Sgd(0.05), epochs=4)
    assert (found == pytest.approx(0.9, abs=1e-3)) == (name == "scaffold"), found


def converged(name: str, optimiser: Optimiser, epochs: int, **options: float) -> float:
    """w after 300 rounds of both clients."""
    losses = (lambda w, batch: 0.5 * w**2), (lambda w, batch: 4.5 * (w - 1) ** 2)
    methods = [scalar.method(name, loss, optimiser, epochs=epochs, **options) for loss in losses]
    zero = scalar.parts(0.0)
    memory = {
        "scaffold": {**tree.prefixed("control_", zero), "counted": {}},
        "feddyn": {**tree.prefixed("drift_", zero), "counted": {}},
    }
    prefix = {"scaffold": "own_control_", "feddyn": "own_drift_"}.get(name, "none_")
    history = {"history": {"trained": torch.zeros(())}}
    own: list[Parts] = [{**tree.prefixed(prefix, zero), **history} for _ in losses]
    shared = {**scalar.parts(0.0), **memory.get(name, {})}
    for _ in range(300):
        updates = []
        for i, method in enumerate(methods):
            down = method.broadcast(shared, str(i))
            up, own[i] = method.local_update(down, own[i], scalar.batches(1))
            updates.append(Update(str(i), 1, up))
        shared = methods[0].aggregate(shared, updates)
    return scalar.value(shared)
