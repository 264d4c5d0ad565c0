"""The quadratic programme over the simplex: known solutions, and the conditions that every minimum fulfils."""

from __future__ import annotations

import numpy as np
import pytest

from edge_fl.learn import simplex


def test_a_diagonal_gives_weights_by_inverse() -> None:
    weights = simplex.minimise(np.diag([1.0, 2.0, 4.0]))
    assert weights is not None
    assert np.allclose(weights, np.array([4, 2, 1]) / 7)


def test_fedpacs_example_of_two_clients() -> None:
    weights = simplex.minimise(np.array([[0.5, 0.0], [0.0, 4.5]]))
    assert weights is not None
    assert np.allclose(weights, [0.9, 0.1])


@pytest.mark.parametrize("clients", [2, 7, 40])
def test_the_minimum_is_one(clients: int) -> None:
    rng = np.random.default_rng(clients)
    spread = rng.normal(size=(clients, 5))
    quadratic = 1e4 * (spread @ spread.T + np.diag(rng.uniform(0.1, 1.0, clients)))
    weights = simplex.minimise(quadratic)
    assert weights is not None
    assert weights.min() >= 0
    assert np.isclose(weights.sum(), 1)
    slope = quadratic @ weights  # equal where a weight is positive, not smaller where it is 0
    level = weights @ slope
    assert np.allclose(slope[weights > 0], level, rtol=0.02)  # weights below 1e-3 were cut off
    assert (slope >= 0.98 * level).all()


def test_a_negligible_weight_is_zero_and_the_rest_still_sum_to_one() -> None:
    weights = simplex.minimise(np.diag([1.0, 5000.0]))
    assert weights is not None
    assert weights.tolist() == [1.0, 0.0]


def test_a_matrix_that_is_not_positive_semidefinite_loses_its_small_eigenvalues() -> None:
    weights = simplex.minimise(np.diag([0.005, 2.0, 3.0, -0.5]))
    without = simplex.minimise(np.diag([0.0, 2.0, 3.0, 0.0]))
    assert weights is not None
    assert without is not None
    assert np.array_equal(weights, without)
    assert np.isclose(weights.sum(), 1)


def test_what_is_not_a_number_has_no_minimum() -> None:
    assert simplex.minimise(np.array([[np.nan]])) is None
