"""Pictures that are chosen for being informative are harder than others: the accuracy is weighted back to all of them."""

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.data import grouping
from edge_fl.heads.head import Features
from edge_fl.heads.probability_calibration import UNCALIBRATED, Calibration, calibrate, from_arrays
from edge_fl.heads.unknowns import NO_CLASSES
from edge_fl_devices.data.first_guesses import weights
from edge_fl_maker.labelling.immediate import informative
from edge_fl_maker.labelling.session import RANDOM_EVERY

CLASSES, DIM = 4, 12
POOL, LABELS, DRAWS = 400, 60, 20


def pool(seed: int) -> tuple[Features, NDArray[np.int64]]:
    """Three in four pictures are easy; the others are nearly between two classes, far from each other, so that their labels add most."""
    rng = np.random.default_rng(seed)
    centres = 3 * np.eye(CLASSES, DIM)
    y = rng.integers(0, CLASSES, POOL)
    z = centres[y] + 0.1 * rng.normal(size=(POOL, DIM))
    hard = rng.random(POOL) < 0.25
    between = 0.5 * (centres[y] + centres[rng.integers(0, CLASSES, POOL)]) + 0.9 * rng.normal(
        size=(POOL, DIM)
    )
    return np.where(hard[:, None], between, z).astype(np.float32), y


def fit(z: Features, y: NDArray[np.int64]) -> heads.Head:
    return heads.fit("cosine", z, y, CLASSES, unit_norm=False)


def labelled(z: Features, y: NDArray[np.int64], seed: int) -> tuple[list[int], list[bool]]:
    """Label as the page does: the most informative picture, and one in RANDOM_EVERY at random."""
    rng = np.random.default_rng([seed, 1])
    rows, chosen, left = list[int](), list[bool](), np.arange(len(y))
    for number in range(LABELS):
        at_random = number % RANDOM_EVERY == RANDOM_EVERY - 1
        if at_random:
            row = int(rng.choice(left))
        else:
            many = len(np.unique(y[rows])) > 1
            shares = UNCALIBRATED.probabilities(fit(z[rows], y[rows]).logits(z[left])) if many else None
            row = int(left[informative(z[left], shares, z[rows], 1, rng)[0]])
        rows.append(row)
        chosen.append(not at_random)
        left = left[left != row]
    return rows, chosen


def test_the_weighted_accuracy_is_that_of_the_whole_pool_where_the_plain_one_is_not() -> None:
    plain, weighted, covered = [], [], []
    for seed in range(DRAWS):
        z, y = pool(seed)
        rows, chosen = labelled(z, y, seed)
        importance = weights(chosen, POOL - LABELS)
        found = calibrate(fit, z[rows], y[rows], importance=importance)
        as_if_random = calibrate(fit, z[rows], y[rows])
        fresh, labels = pool(seed + 1000)
        true = float((fit(z[rows], y[rows]).predict(fresh) == labels).mean())
        plain.append(as_if_random.accuracy - true)
        weighted.append(found.accuracy - true)
        covered.append(found.interval[0] <= true <= found.interval[1])
        assert found.effective < as_if_random.effective  # random pictures are few
    assert np.mean(plain) < -0.05
    assert abs(np.mean(weighted)) < 0.03
    assert np.mean(covered) >= 0.8


def test_weights_are_those_of_two_strata() -> None:
    """Accuracy = share_A acc_A + (1 - share_A) acc_B with share_A = n_A / (labelled + unlabelled)."""
    chosen, right = [True] * 6 + [False] * 4, np.array([True] * 3 + [False] * 3 + [True] * 3 + [False])
    importance = weights(chosen, 90)
    assert importance.mean() == pytest.approx(1)
    share = 6 / 100
    assert grouping.mean(right, grouping.alone(), importance) == pytest.approx(
        share * 0.5 + (1 - share) * 0.75
    )
    assert grouping.effective(grouping.alone(), 10, importance) == pytest.approx(
        1 / (share**2 / 6 + (1 - share) ** 2 / 4)
    )
    assert not len(weights(chosen, 0)) and not len(weights([False] * 10, 90))


def test_informative_pictures_alone_measure_nothing() -> None:
    confidences, right = np.full(10, 0.5, np.float32), np.ones(10, np.bool_)
    far = np.zeros(10, np.float32)

    def found(chosen: list[bool]) -> Calibration:
        made = Calibration(1.0, confidences, right, NO_CLASSES, far, importance=weights(chosen, 50))
        return from_arrays(made.to_arrays())  # as it is stored

    assert not found([True] * 10).is_measured
    assert found([True] * 9 + [False]).is_measured
    assert found([True] * 9 + [False]).interval[0] < 0.4  # from one picture
