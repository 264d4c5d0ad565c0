"""Informative pictures are far from the labelled ones, typical, and among those that the head confuses; every row comes once."""

import numpy as np
import pytest

from edge_fl_maker.labelling.immediate import MOST_COVERED, MOST_GREEDY, informative, uncertainty

NONE = np.empty((0, 16), np.float32)


def clusters(sizes: list[int], spread: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Features around one direction per cluster, and the cluster of each."""
    rng = np.random.default_rng(0)
    number = np.repeat(np.arange(len(sizes)), sizes)
    z = np.eye(16, dtype=np.float32)[number] + spread * rng.random((len(number), 16), np.float32)
    return z, number


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_without_a_head_every_cluster_is_asked_for_before_one_is_repeated() -> None:
    z, number = clusters([50, 5, 20, 10])
    order = informative(z, None, NONE, 8, rng())
    assert list(number[order[:4]]) == [0, 2, 3, 1]  # the largest first
    assert len(order) == 8 and (order == informative(z, None, NONE, 8, rng())).all()


def test_what_is_like_a_labelled_picture_does_not_come_first() -> None:
    z, number = clusters([30, 10, 10])
    assert number[informative(z, None, NONE, 1, rng())[0]] == 0
    order = informative(z, None, z[number == 0][:3], len(z), rng())
    assert set(number[order[:2]]) == {1, 2}


def test_uncertain_pictures_come_before_equally_novel_ones() -> None:
    z, number = clusters([20, 20])
    shares = np.where(number[:, None] == 1, [[0.5, 0.5]], [[0.95, 0.05]]).astype(np.float32)
    order = informative(z, shares, NONE, 1, rng())
    assert number[order[0]] == 1


def test_an_outlier_alone_does_not_come_before_a_typical_picture() -> None:
    z, number = clusters([30, 1])
    assert number[informative(z, None, NONE, 1, rng())[0]] == 0


@pytest.mark.parametrize("count", [0, 1, 3, MOST_GREEDY + 50])
@pytest.mark.parametrize("pictures", [0, 1, MOST_GREEDY + 20, MOST_COVERED + 50])
def test_every_row_comes_once(pictures: int, count: int) -> None:
    z = np.random.default_rng(0).normal(size=(pictures, 16)).astype(np.float32)
    shares = np.random.default_rng(0).dirichlet(np.ones(3), pictures).astype(np.float32).reshape(-1, 3)
    order = informative(z, shares, z[:5], count, rng())
    assert len(order) == len(set(order)) == min(count, pictures)
    assert order.dtype == np.int64 and set(order) <= set(range(pictures))


def test_pictures_like_the_chosen_ones_come_last() -> None:
    different = np.random.default_rng(0).normal(size=(MOST_GREEDY + 20, 16)).astype(np.float32)
    z = np.concatenate([different, different])
    order = informative(z, None, NONE, len(z), rng()) % len(different)
    assert set(order[-MOST_GREEDY:]) == set(order[:MOST_GREEDY])


def test_uncertainty_is_one_for_a_tie_and_none_for_a_single_class() -> None:
    shares = np.array([[0.4, 0.4, 0.2], [0.7, 0.1, 0.2], [1, 0, 0]], np.float32)
    assert uncertainty(shares) == pytest.approx([1, 0.5, 0])
    assert uncertainty(np.ones((2, 1), np.float32)) == pytest.approx([0, 0])
