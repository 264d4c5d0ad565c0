"""FedPAC: features pulled to class means, heads combined by a quadratic programme (docs/methods-personal-heads.md, "FedPAC" and F11)."""

import numpy as np
import pytest
import torch

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update, prototypes
from edge_fl.learn.batches import Batches
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods import fedpac
from edge_fl.methods.contract import steps
from edge_fl.methods.fedpac import spread
from tests.edge_fl.methods import toy


def share(weight: float, h: list[list[float]], v: float) -> Parts:
    """What a client of the smallest kind sends, its head one number."""
    head = {"weight": torch.tensor(weight)}
    return {"head": head, "spread": {"V": torch.tensor(v), "H": torch.tensor(h)}}


def test_the_spread_of_four_features_has_the_numbers_of_section_7() -> None:
    z = Batches.of(torch.tensor([[1.0, 0], [3, 0], [0, 2], [0, 2]]), torch.tensor([0, 0, 1, 1]), classes=2)
    found = spread(z)
    assert torch.equal(found["H"], torch.eye(2))
    assert torch.isclose(found["V"], torch.tensor(0.625))


def test_padding_does_not_spread() -> None:
    z = torch.tensor([[1.0, 0], [3, 0], [0, 2], [0, 2], [9, 9]])
    found = spread(Batches.of(z, torch.tensor([0, 0, 1, 1, -1]), classes=2))
    assert torch.isclose(found["V"], torch.tensor(0.625))


def test_two_opposite_clients_keep_nine_tenths_of_their_own_head() -> None:
    h = np.array([[1.0, 0, 0, 1], [0, 1, 1, 0]])
    first, second = fedpac.combination_weights(np.array([0.5, 0.5]), h)
    assert first is not None
    assert second is not None
    assert np.allclose(first, [0.9, 0.1])
    assert np.allclose(second, [0.1, 0.9])


def test_identical_clients_count_by_the_inverse_of_their_variance() -> None:
    for weights in fedpac.combination_weights(np.array([1.0, 2.0, 4.0]), np.ones((3, 4))):
        assert weights is not None
        assert np.allclose(weights, np.array([4, 2, 1]) / 7)


def test_weights_of_real_clients_are_not_negative_and_sum_to_one() -> None:
    run = toy.federate(toy.method("fedpac"))
    spreads = [update.parts["spread"] for update in run.updates[-1].values()]
    v = np.array([float(s["V"]) for s in spreads])
    h = np.array([s["H"].numpy().ravel() for s in spreads], np.float64)
    assert (v > 0).all()
    for weights in fedpac.combination_weights(v, h):
        assert weights is not None
        assert weights.min() >= 0
        assert np.isclose(weights.sum(), 1)


def test_the_server_mixes_heads_by_these_weights_for_each_client() -> None:
    method = toy.method("fedpac")
    shared = {**steps.start(method), "head": {"weight": torch.tensor(0.0)}}
    updates = [
        Update("a", 1, share(10.0, [[1, 0], [0, 1]], 0.5)),
        Update("b", 1, share(20.0, [[0, 1], [1, 0]], 0.5)),
    ]
    new = method.aggregate(shared, iter(updates))
    heads = {id: float(method.broadcast(new, id)["head"]["weight"]) for id in ("a", "b", "c")}
    assert heads == pytest.approx({"a": 11.0, "b": 19.0, "c": 15.0})
    later = method.aggregate(new, iter(updates[1:]))
    assert method.broadcast(later, "a")["head"] == method.broadcast(new, "a")["head"]
    assert float(method.broadcast(later, "b")["head"]["weight"]) == 20


def test_a_client_whose_programme_has_no_solution_keeps_its_own_head() -> None:
    method = toy.method("fedpac")
    shared = {**steps.start(method), "head": {"weight": torch.tensor(0.0)}}
    broken = [Update(id, 1, share(n, [[torch.nan]], 0.5)) for id, n in (("a", 10.0), ("b", 20.0))]
    new = method.aggregate(shared, iter(broken))
    assert [float(method.broadcast(new, id)["head"]["weight"]) for id in ("a", "b")] == [10, 20]


def test_a_round_sends_statistics_of_the_received_and_prototypes_of_the_trained_extractor() -> None:
    run = toy.federate(toy.method("fedpac"))
    for updates in run.updates:
        sent = {"extractor", "head", "prototypes", "spread"}
        assert all(update.parts.keys() == sent for update in updates.values())
    for downs in run.downs:
        assert all(down.keys() == {"extractor", "head", "prototypes"} for down in downs.values())
    down, up, data = run.downs[1]["c0"], run.updates[1]["c0"].parts, toy.batches(round=2)
    assert tree.same(up["spread"], spread(data.features(run.method.net.extractor, down["extractor"])))
    trained = prototypes(data.features(run.method.net.extractor, up["extractor"]))
    assert torch.equal(up["prototypes"]["mean"], trained["mean"])


def test_the_head_takes_one_epoch_on_the_received_extractor() -> None:
    method = toy.method("fedpac", epochs=3, head_lr=0.1)
    down, data = steps.broadcast(method, steps.start(method), "c0"), toy.batches()
    z = data.features(method.net.extractor, down["extractor"])
    alone = toy.method("fedpac", optimiser=Sgd(0.1, 5e-4, momentum=0.5))
    expected = alone.train(alone.head_loss, down["head"], z, stage="s1", epochs=1)
    assert tree.same(method.local_update(down, {}, data)[0]["head"], expected)


def test_features_are_pulled_to_their_class_from_the_second_round_on() -> None:
    def learned(lam: float, count: float) -> Parts:
        method = toy.method("fedpac", lam=lam)
        down = steps.broadcast(method, steps.start(method), "c0")
        known = {"mean": torch.ones(10, 12), "count": torch.full((10,), count)}
        return method.local_update({**down, "prototypes": known}, {}, toy.batches())[0]

    def away(up: Parts) -> torch.Tensor:
        return (up["prototypes"]["mean"][:5] - 1).norm()

    assert tree.same(learned(1.0, 0.0)["extractor"], learned(0.0, 0.0)["extractor"])
    assert away(learned(2.0, 7.0)) < away(learned(0.0, 7.0))


def test_a_class_without_global_mean_is_pulled_to_the_clients_own() -> None:
    method = toy.method("fedpac", lam=5.0)
    down = steps.broadcast(method, steps.start(method), "c0")
    z = toy.batches().features(method.net.extractor, down["extractor"])
    known = torch.arange(10) < 5
    partly = {"mean": torch.where(known[:, None], 1.0, 77.0).expand(10, 12), "count": known.float()}
    wholly = {
        "mean": torch.where(known[:, None], 1.0, prototypes(z)["mean"]),
        "count": torch.ones(10),
    }
    ups = [method.local_update({**down, "prototypes": p}, {}, toy.batches())[0] for p in (partly, wholly)]
    assert tree.same(ups[0]["extractor"], ups[1]["extractor"])


def test_a_diagonal_matrix_gives_weights_in_inverse_proportion() -> None:
    weights = fedpac.minimise(np.diag([1.0, 2.0, 4.0]))
    assert weights is not None
    assert np.allclose(weights, np.array([4, 2, 1]) / 7)


def test_the_weights_of_two_opposite_clients() -> None:
    weights = fedpac.minimise(np.array([[0.5, 0.0], [0.0, 4.5]]))
    assert weights is not None
    assert np.allclose(weights, [0.9, 0.1])


@pytest.mark.parametrize("clients", [2, 7, 40])
def test_weights_fulfil_the_conditions_of_a_minimum(clients: int) -> None:
    rng = np.random.default_rng(clients)
    spread = rng.normal(size=(clients, 5))
    quadratic = 1e4 * (spread @ spread.T + np.diag(rng.uniform(0.1, 1.0, clients)))
    weights = fedpac.minimise(quadratic)
    assert weights is not None
    assert weights.min() >= 0
    assert np.isclose(weights.sum(), 1)
    slope = quadratic @ weights  # equal where a weight is positive, not smaller where it is 0
    level = weights @ slope
    assert np.allclose(slope[weights > 0], level, rtol=0.02)  # weights below 1e-3 were cut off
    assert (slope >= 0.98 * level).all()


def test_a_negligible_weight_is_zero_and_the_rest_still_sum_to_one() -> None:
    weights = fedpac.minimise(np.diag([1.0, 5000.0]))
    assert weights is not None
    assert weights.tolist() == [1.0, 0.0]


def test_a_matrix_that_is_not_positive_semidefinite_loses_its_small_eigenvalues() -> None:
    weights = fedpac.minimise(np.diag([0.005, 2.0, 3.0, -0.5]))
    without = fedpac.minimise(np.diag([0.0, 2.0, 3.0, 0.0]))
    assert weights is not None
    assert without is not None
    assert np.array_equal(weights, without)
    assert np.isclose(weights.sum(), 1)


def test_a_matrix_with_nan_has_no_minimum() -> None:
    assert fedpac.minimise(np.array([[np.nan]])) is None
