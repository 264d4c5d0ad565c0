"""Whatever the labels and the seed, a rule deals every sample at most once, keeps its minimum and repeats itself exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.data import partition
from edge_fl.errors import DataError

labels = st.lists(st.integers(0, 4), min_size=8, max_size=120).map(lambda ids: np.array(ids, np.int64))
clients = st.integers(1, 8)
seeds = st.integers(0, 2**31)


def dealt(owned: list[np.ndarray]) -> list[int]:
    """Every dealt index, ascending; fails when one client's are not ascending."""
    assert all(np.all(np.diff(indices) > 0) for indices in owned)
    return sorted(np.concatenate(owned).tolist())


@given(labels, clients, st.sampled_from([1e-300, 0.01, 0.3, 1.0, 100.0]), seeds)
def test_dirichlet_deals_every_sample_once_and_keeps_the_minimum(
    y: np.ndarray, n: int, beta: float, seed: int
) -> None:
    owned = partition.dirichlet(y, n, beta, seed, tries=3)
    assert dealt(owned) == list(range(len(y)))
    assert len(owned) == n
    assert min(map(len, owned)) >= min(partition.MINIMUM, len(y) // n)


@given(labels, clients, st.sampled_from([1e-300, 0.01, 0.3, 1.0, 100.0]), seeds)
def test_dirichlet_by_client_deals_every_sample_once_in_equal_shares(
    y: np.ndarray, n: int, beta: float, seed: int
) -> None:
    owned = partition.dirichlet_clients(y, n, beta, seed)
    assert dealt(owned) == list(range(len(y)))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_dirichlet_by_client_follows_each_clients_own_shares() -> None:
    y = np.repeat(np.arange(10), 2000)
    few, many = (
        [
            np.bincount(y[rows], minlength=10) / len(rows)
            for rows in partition.dirichlet_clients(y, 20, beta, 0)
        ]
        for beta in (0.1, 100.0)
    )
    assert np.mean([share.max() for share in few]) > 0.4 > 0.2 > max(share.max() for share in many)


@given(labels, clients, seeds)
def test_iid_deals_every_sample_once_in_equal_shares(y: np.ndarray, n: int, seed: int) -> None:
    owned = partition.iid(y, n, seed)
    assert dealt(owned) == list(range(len(y)))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


@given(st.integers(2, 6), st.integers(1, 12), st.data(), seeds)
def test_pathological_clients_hold_exactly_their_number_of_classes(
    classes: int, n: int, data: st.DataObject, seed: int
) -> None:
    k = data.draw(st.integers(1, classes))
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), n))
    owned = partition.pathological(y, n, k, seed)
    assert [len(np.unique(y[indices])) for indices in owned] == [k] * n
    held = np.bincount(np.concatenate([np.unique(y[indices]) for indices in owned]), minlength=classes)
    assert held.max() - held.min() <= 1
    if n * k >= classes:
        assert dealt(owned) == list(range(len(y)))
    else:
        assert set(y[dealt(owned)]) == set(np.flatnonzero(held))


@given(st.integers(1, 4), st.integers(0, 6), seeds)
def test_every_client_has_one_domain_and_every_domain_is_dealt(domains: int, more: int, seed: int) -> None:
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(domains), 12))
    owned = partition.by_domain(y, domains + more, seed)
    assert dealt(owned) == list(range(len(y)))
    assert [set(y[indices]) for indices in owned] == [{client % domains} for client in range(domains + more)]


Y = np.repeat(np.arange(5), 40)


@pytest.mark.parametrize(
    "deal",
    [
        lambda seed: partition.dirichlet(Y, 6, 0.3, seed),
        lambda seed: partition.pathological(Y, 6, 2, seed),
        lambda seed: partition.by_domain(Y, 10, seed),
        lambda seed: partition.iid(Y, 6, seed),
    ],
)
def test_the_seed_and_nothing_else_decides(deal) -> None:
    first, again, other = deal(1), deal(1), deal(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_small_beta_concentrates_classes_and_large_beta_spreads_them() -> None:
    y = np.repeat(np.arange(10), 200)

    def classes_held(beta: float) -> float:
        return float(
            np.mean(
                [
                    np.sum(np.bincount(y[owned], minlength=10) > 5)
                    for owned in partition.dirichlet(y, 10, beta, 0)
                ]
            )
        )

    assert classes_held(0.05) < 4 < 9 < classes_held(100)


def test_when_draws_do_not_help_samples_move_until_the_minimum_holds() -> None:
    # one class: a draw gives nearly all of it to one client
    owned = partition.dirichlet(np.zeros(40, np.int64), 4, 0.001, 0, tries=2)
    assert sorted(map(len, owned)) == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("deal", "message"),
    [
        (lambda: partition.iid(np.zeros(2, np.int64), 3, 0), "2 samples for 3 clients"),
        (lambda: partition.dirichlet(Y, 0, 0.3, 0), "0 clients"),
        (lambda: partition.dirichlet(Y, 2, 0.0, 0), "beta 0.0"),
        (lambda: partition.pathological(Y, 4, 6, 0), "6 classes per client, expected 1 to 5"),
        (lambda: partition.pathological(np.arange(5), 5, 2, 0), "class 0 has 1 samples for the"),
        (lambda: partition.by_domain(Y, 4, 0), "at least one for each of the 5 domains"),
    ],
)
def test_what_cannot_be_dealt_is_refused(deal, message: str) -> None:
    with pytest.raises(DataError, match=f"{message}.*nothing was changed"):
        deal()
