"""FedProx: proximal term and stragglers (docs/methods-global.md, "FedProx")."""

from dataclasses import replace

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from tests.edge_fl.methods import scalar, toy


def trained(method: Method, batch_size: int = 8) -> tuple[Parts, Parts]:
    """(received, sent) of one client's first round."""
    down = steps.broadcast(method, steps.start(method), "c0")
    return down, toy.train(method, down, steps.start_own(method, "c0"), toy.batches(batch_size=batch_size))[0]


def distance(a: Parts, b: Parts) -> float:
    gaps = [(t - b[p[0]][p[1]]).norm() ** 2 for p, t in tree.parameters(a).items()]
    return float(torch.stack(gaps).sum().sqrt())


def test_one_step_without_a_gradient_goes_back_by_mu_times_the_rate() -> None:
    data = scalar.batches(2)
    first, _ = (batch.y.item() for batch in data.batches("train", 1))
    # w = 1 arrives; the first batch moves it to 2, the second has no gradient of its own
    method = scalar.method("fedprox", lambda w, batch: -10 * w * (batch.y == first).sum(), Sgd(0.1), mu=0.1)
    up, _ = method.local_update(scalar.parts(1.0), {}, data)
    assert scalar.value(up) == pytest.approx(1.99)


def test_the_first_step_of_a_round_feels_no_pull() -> None:
    one_batch = {"batch_size": 64}
    assert tree.same(
        trained(toy.method("fedprox", mu=100.0), **one_batch)[1],
        trained(toy.method("fedavg"), **one_batch)[1],
    )


def test_a_large_mu_keeps_the_client_at_the_received_model() -> None:
    free, held = (
        trained(toy.method("fedprox", optimiser=Sgd(1e-3), epochs=20, mu=mu)) for mu in (0.0, 1000.0)
    )
    assert distance(*held) < 0.05 * distance(*free)


def test_the_mean_is_weighted_by_samples() -> None:
    run = toy.federate(toy.method("fedprox"), rounds=1)
    heads = {id: update.parts["head"]["weight"] for id, update in run.updates[0].items()}
    weights = {id: update.samples for id, update in run.updates[0].items()}
    mean = sum(heads[id].double() * weights[id] for id in heads) / sum(weights.values())
    assert torch.allclose(run.shared["head"]["weight"], mean.float(), atol=1e-7)


def test_a_straggler_stops_after_whole_epochs_the_same_in_every_run() -> None:
    data = toy.batches()
    steps_of = {len(list(data.batches("train", epochs))) for epochs in (1, 2, 3, 4)}
    hurried = [len(list(replace(data, round=r).with_stragglers(0.5).batches("train", 4))) for r in range(40)]
    assert set(hurried) == steps_of
    assert 10 <= hurried.count(max(steps_of)) < 35
    again = [len(list(replace(data, round=r).with_stragglers(0.5).batches("train", 4))) for r in range(40)]
    assert hurried == again


def test_without_stragglers_nothing_changes() -> None:
    plain, hurried = toy.method("fedprox"), toy.method("fedprox", stragglers=0.0)
    assert tree.same(trained(plain)[1], trained(hurried)[1])
    late = toy.method("fedprox", stragglers=1.0, epochs=3)
    assert not tree.same(trained(late)[1], trained(toy.method("fedprox", epochs=3))[1])
