"""Class-Statistics: the sums of all clients give each a better head (docs/methods-personal-heads.md, "Class-Statistics")."""

import numpy as np
import pytest
import torch

from edge_fl import heads
from edge_fl.heads import HeadPlan
from edge_fl.heads.class_statistics import sums
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from tests.edge_fl.methods import toy

NAME = "class-statistics"


def features(federation: toy.Federation, client: str) -> tuple[np.ndarray, np.ndarray]:
    method, data = federation.method, federation.clients[client].batches(1)
    z = data.features(method.net.extractor, federation.shared["extractor"])
    return z.x.numpy(), z.y.numpy()


def test_the_prior_is_the_sum_of_the_devices_own_statistics() -> None:
    federation = toy.federate(toy.method(NAME), rounds=1)
    total = 0.0
    for client in federation.clients:
        z, y = features(federation, client)
        if len(np.unique(y)) > 1:
            total = total + sums.of(z, y, 10).flat
    found = {name: tensor.numpy() for name, tensor in federation.shared["prior"].items()}
    assert np.allclose(sums.from_arrays(found).flat, total, atol=1e-4)


def test_clients_may_come_in_any_round_and_count_once() -> None:
    together = toy.federate(toy.method(NAME), rounds=1)
    here = {1: ["c0", "c3"], 2: ["c0", "c1", "c2"], 3: ["c2", "c4"]}
    apart = toy.federate(toy.method(NAME), rounds=3, cohort=lambda number: here[number])
    assert torch.equal(apart.shared["prior"]["count"], together.shared["prior"]["count"])
    assert torch.allclose(apart.shared["prior"]["moment"], together.shared["prior"]["moment"], atol=1e-4)


def test_the_extractor_stays_and_only_statistics_travel_up() -> None:
    federation = toy.federate(toy.method(NAME))
    assert tree.same(federation.shared["extractor"], federation.history[0]["extractor"])
    assert all(u.parts.keys() <= {"prior"} for sent in federation.updates for u in sent.values())
    assert not federation.updates[0][toy.SINGLE].parts
    assert all(down.keys() == {"extractor", "prior"} for down in federation.downs[1].values())


def test_an_update_without_statistics_changes_nothing() -> None:
    federation = toy.federate(toy.method(NAME), rounds=1)
    new = federation.method.aggregate(federation.shared, [Update("x", 5, {})])
    assert tree.same(new, federation.shared)


def test_the_head_is_that_of_a_device_with_the_prior_of_the_others() -> None:
    federation = toy.federate(toy.method(NAME), rounds=1)
    z, y = features(federation, "c0")
    total = {name: tensor.numpy() for name, tensor in federation.shared["prior"].items()}
    others = sums.from_arrays(total).without(sums.of(z, y, 10))
    extras = {"prior": others.addends()}
    plan = HeadPlan("cosine", fleet="prior")
    head = heads.fit("logistic", z, y, 10, unit_norm=False, plan=plan, extras=extras)
    method, client, x = federation.method, federation.clients["c0"], federation.images("c0")
    _, own = method.personalise(federation.shared, federation.own["c0"], client.batches(1))
    expected = head.logits(method.features(federation.shared, x).numpy())
    assert np.allclose(method.predict({**federation.shared, **own}, x).numpy(), expected, atol=1e-3)


@pytest.mark.parametrize("rounds", [0, 1])
def test_before_any_sum_and_without_the_prior_it_is_the_cosine_head_of_the_own_labels(rounds: int) -> None:
    federation = toy.federate(toy.method(NAME, prior=rounds == 0), rounds=rounds)
    z, y = features(federation, "c0")
    head = heads.fit("cosine", z, y, 10, unit_norm=False)
    method, client, x = federation.method, federation.clients["c0"], federation.images("c0")
    _, own = method.personalise(federation.shared, federation.own["c0"], client.batches(1))
    expected = head.logits(method.features(federation.shared, x).numpy())
    assert np.allclose(method.predict({**federation.shared, **own}, x).numpy(), expected, atol=1e-3)


def test_a_client_with_a_single_class_knows_the_others_from_the_prior() -> None:
    federation = toy.federate(toy.method(NAME), rounds=1)
    method, client = federation.method, federation.clients[toy.SINGLE]
    _, own = method.personalise(federation.shared, federation.own[toy.SINGLE], client.batches(1))
    logits = method.predict({**federation.shared, **own}, federation.images("c0")).numpy()
    assert np.isfinite(logits).sum(axis=1).min() > 1
