"""FedDyn: a regularisation that changes with the client's past (docs/methods-global.md, "FedDyn")."""

import pytest
import torch
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.optimiser import Sgd
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy
from tests.edge_fl.methods.test_scaffold import COHORTS, MODEL, converged, varied


def test_a_later_participation_equals_a_plain_loop() -> None:
    method = toy.method("feddyn", epochs=2, optimiser=Sgd(0.1), alpha=0.5)
    down, d = steps.broadcast(method, steps.start(method), "c0"), varied(method.net.zeros(), 0.1)
    modules = {name: toy.module_of(method.net.parts[name], down[name]) for name in MODEL}
    held = [
        (down[name][key], d[name][key], t) for name in MODEL for key, t in modules[name].named_parameters()
    ]
    optimiser = torch.optim.SGD([t for _, _, t in held], lr=0.1)
    for batch in toy.batches().batches("train", 2, norm=True):
        loss = F.cross_entropy(modules["head"](modules["extractor"](batch.x)), batch.y)
        for received, past, t in held:
            gradient = -0.5 * past  # h = -α d
            loss = loss - (gradient * t).sum() + 0.25 * ((t - received) ** 2).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    up, new = method.local_update(down, tree.prefixed("own_drift_", d), toy.batches())
    assert all(toy.same_as(up[name], module) for name, module in modules.items())
    for name in MODEL:
        for key, past in d[name].items():
            expected = past + up[name][key] - down[name][key]
            assert torch.allclose(new[f"own_drift_{name}"][key], expected, atol=1e-6)


def test_the_server_adds_the_mean_of_what_all_clients_that_took_part_have_moved() -> None:
    for number in COHORTS:
        run = toy.federate(toy.method("feddyn"), number, cohort=COHORTS.__getitem__)
        came = sorted({id for earlier in range(1, number + 1) for id in COHORTS[earlier]})
        assert sorted(run.shared["counted"]) == came
        for name in MODEL:
            for key, tensor in run.shared[f"drift_{name}"].items():
                moved = torch.stack([run.own[id][f"own_drift_{name}"][key] for id in came]).mean(0)
                assert torch.allclose(tensor, moved, atol=1e-5), (number, name, key)
                sent = torch.stack([update.parts[name][key] for update in run.updates[-1].values()])
                assert torch.allclose(run.shared[name][key], sent.mean(0) + moved, atol=1e-5)


def test_running_statistics_are_those_of_the_mean() -> None:
    run = toy.federate(toy.method("feddyn"), rounds=1)
    name = "buffer:extractor.convolutions.1.running_var"
    sent = torch.stack([update.parts["extractor"][name] for update in run.updates[0].values()])
    assert torch.allclose(run.shared["extractor"][name], sent.mean(0))


@pytest.mark.parametrize("name", ["feddyn", "fedprox"])
def test_clients_of_different_curvature_agree_on_the_minimum_of_the_mean_loss(name: str) -> None:
    options = {"feddyn": {"alpha": 1.0}, "fedprox": {"mu": 1.0}}[name]
    found = converged(name, Sgd(0.05), epochs=40, **options)
    assert (found == pytest.approx(0.9, abs=1e-3)) == (name == "feddyn"), found
