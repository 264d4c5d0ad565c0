"""Per-FedAvg: the gradient is taken after an inner step (docs/methods-global.md, "Per-FedAvg")."""

import pytest

from edge_fl.learn import tree
from edge_fl.learn.fit import descend
from edge_fl.learn.optimiser import Sgd
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import scalar, toy


@pytest.mark.parametrize(("variant", "batches", "expected"), [("fo", 2, 0.55), ("hf", 3, 0.595)])
def test_on_a_quadratic_it_takes_the_papers_step(variant: str, batches: int, expected: float) -> None:
    method = scalar.method("per-fedavg", lambda w, batch: 0.5 * w**2, Sgd(0.5), alpha=0.1, variant=variant)
    assert scalar.value(
        method.local_update(scalar.parts(1.0), {}, scalar.batches(batches))[0]
    ) == pytest.approx(expected, abs=1e-5)


def test_batches_without_partners_are_left_out() -> None:
    method = scalar.method("per-fedavg", lambda w, batch: 0.5 * w**2, Sgd(0.5), alpha=0.1)
    for number, expected in [(1, 1.0), (2, 0.55), (3, 0.55), (4, 0.55**2)]:
        assert scalar.value(
            method.local_update(scalar.parts(1.0), {}, scalar.batches(number))[0]
        ) == pytest.approx(expected)


def test_with_alpha_zero_it_is_fedavg_on_every_second_batch() -> None:
    method = toy.method("per-fedavg", toy.flat_net(), alpha=0.0)
    down, data = steps.broadcast(method, steps.start(method), "c0"), toy.batches()
    up, _ = method.local_update(down, {}, data)
    w, state = tree.clone(down), method.optimiser.init(tree.parameters(down))
    for batch in list(data.batches("train", 1))[1::2]:
        w, state = descend(method.loss, w, state, batch, method.optimiser)
    assert tree.same(up, w)


def test_the_first_batch_of_a_pair_is_only_looked_ahead_with() -> None:
    data = scalar.batches(2)
    first, second = (batch.y.item() for batch in data.batches("train", 1))
    method = scalar.method(
        "per-fedavg", lambda w, b: 0.5 * (w - 2 * (b.y == first).sum()) ** 2, Sgd(0.5), alpha=0.1
    )
    ahead = 1 - 0.1 * (1 - 2)  # on the first batch, whose minimum is 2; the second's is 0
    assert scalar.value(method.local_update(scalar.parts(1.0), {}, data)[0]) == pytest.approx(1 - 0.5 * ahead)
    assert first != second


def test_adapting_leaves_the_meta_model_as_it_is_and_takes_one_step_on_training_data() -> None:
    method = scalar.method("per-fedavg", lambda w, batch: 0.5 * w**2, Sgd(0.5), alpha=0.1)
    down = scalar.parts(1.0)
    up, own = method.personalise(down, {}, scalar.batches(4))
    assert up == {}
    assert scalar.value(down) == 1.0
    assert scalar.value(own, "adapted_extractor") == pytest.approx(0.9)
    run = toy.federate(toy.method("per-fedavg"))
    _, own = steps.personalise(
        run.method, steps.broadcast(run.method, run.shared, "c0"), {}, toy.batches(round=2)
    )
    assert not tree.same(own["adapted_head"], run.shared["head"])


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_a_client_with_a_single_batch_trains_on_parts_of_it(variant: str) -> None:
    method = toy.method("per-fedavg", variant=variant)
    run = toy.federate(method, rounds=1, data=toy.clients(batch_size=64))
    moved = tree.parameters(run.updates[0]["c0"].parts)
    assert not any(moved[path].equal(t) for path, t in tree.parameters(run.downs[0]["c0"]).items())
    before, after = (tree.parameters(w) for w in (run.downs[0][toy.PAIR], run.updates[0][toy.PAIR].parts))
    assert all(t.equal(before[path]) for path, t in after.items())  # two samples: too few for BatchNorm
