"""Near duplicates are found and clean data stay apart; groups count once, and no fold cuts one."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge_fl.data import datasets, grouping
from edge_fl.data.grouping import alone, folds, joined, near_duplicates, nearness
from edge_fl.modalities.pictures import thumbnails

SIDE = 96


def photo(number: int) -> np.ndarray:
    """A smooth picture uint8 [3, SIDE, SIDE]."""
    spots = Image.fromarray(np.random.default_rng(number).integers(0, 256, (7, 7, 3), np.uint8))
    return np.asarray(spots.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def jpeg(picture: np.ndarray) -> np.ndarray:
    buffer = BytesIO()
    Image.fromarray(picture.transpose(1, 2, 0)).save(buffer, "JPEG", quality=60)
    return np.asarray(Image.open(buffer)).transpose(2, 0, 1)


def found(images: np.ndarray, side: int = SIDE) -> list[int]:
    """The number of each image's group."""
    given = near_duplicates(thumbnails(images), nearness(np.full(len(images), side)))
    return grouping.numbers(given, len(images)).tolist()


def test_changed_copies_of_a_picture_are_grouped_with_it_and_others_are_not() -> None:
    rng, photos = np.random.default_rng(0), [photo(number) for number in range(6)]
    changed = [
        each
        for picture in photos
        for each in (
            picture,
            (picture + rng.normal(0, 6, picture.shape)).clip(0, 255).astype(np.uint8),
            (picture * 0.8).astype(np.uint8),
            jpeg(picture),
            np.roll(picture, (1, 1), (1, 2)),
        )
    ]
    assert found(np.stack(changed)) == np.repeat(np.arange(6), 5).tolist()


def test_chains_of_near_duplicates_are_one_group_in_any_order_and_across_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "BLOCK", 8)
    frames = [np.roll(photo(scene), (step, 0), (1, 2)) for scene in (1, 2) for step in range(20)]
    order = np.random.default_rng(1).permutation(40)
    given = np.array(found(np.stack(frames)[order]))
    scenes = order // 20
    assert len(set(given)) == 2 and all(len(set(given[scenes == scene])) == 1 for scene in (0, 1))


def test_small_clean_pictures_stay_apart_although_they_are_alike() -> None:
    x = datasets.load("digits", Path("nowhere")).samples.x
    assert len(set(found(x, side=8))) == len(x)


def test_flat_pictures_are_grouped_with_equal_ones_only() -> None:
    """Noise of one grey level looks like any other."""
    levels = [np.full((1, 64, 64), level, np.uint8) for level in (10, 90, 10, 200)]
    assert found(np.stack(levels)) == [0, 1, 0, 2]
    noise = np.random.default_rng(0).integers(98, 103, (8, 1, 64, 64)).astype(np.uint8)
    assert found(noise) == list(range(8))


@pytest.mark.parametrize("n", [0, 1])
def test_without_two_pictures_there_is_no_group(n: int) -> None:
    assert not len(near_duplicates(thumbnails(np.zeros((n, 1, 9, 9), np.uint8)), np.zeros(n, np.float32)))


def test_groupings_are_joined_and_unknown_ones_do_not_join() -> None:
    minutes, recordings = np.array([5, 5, -1, -1, 7, 8]), np.array([-1, 3, 3, -1, -1, -1])
    assert joined(minutes, alone(), recordings).tolist() == [0, 0, 0, 1, 2, 3]
    assert not len(joined()) and not len(joined(np.array([1, 2, 3])))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=80), st.integers(2, 5))
def test_no_fold_cuts_a_group(drawn: list[tuple[int, int]], count: int) -> None:
    y, given = (np.array(column, np.int64) for column in zip(*drawn, strict=True))
    fold = folds(y, given, count)
    assert all(len(set(fold[given == group])) == 1 for group in set(given))
    assert fold.min() >= 0 and fold.max() < count


@given(st.lists(st.integers(0, 6), min_size=1, max_size=100), st.integers(2, 5))
def test_pictures_that_are_alone_are_dealt_out_in_turn(labels: list[int], count: int) -> None:
    """Every class from the first fold on, so that no class of a fold is in the minority among the others."""
    y = np.array(labels, np.int64)
    expected = np.empty(len(y), np.int64)
    for label in np.unique(y):
        expected[y == label] = np.arange((y == label).sum()) % count
    assert folds(y, alone(), count).tolist() == expected.tolist()
    assert folds(y, np.arange(len(y)), count).tolist() == expected.tolist()


def test_groups_of_a_class_are_spread_over_the_folds() -> None:
    y, given = (
        np.repeat([0, 1], 30),
        np.concatenate([np.repeat(np.arange(6), 5), 6 + np.repeat(np.arange(5), 6)]),
    )
    fold = folds(y, given, 5)
    assert all(len(set(fold[y == label])) == 5 for label in (0, 1))


def test_every_group_counts_once() -> None:
    right, given = np.array([True, True, True, False]), np.array([0, 0, 0, 1])
    assert grouping.mean(right, given) == 0.5 and grouping.mean(right, alone()) == 0.75
    assert grouping.weights(given, 4).tolist() == pytest.approx([1 / 3] * 3 + [1])
    assert grouping.count(given, 4) == 2 and grouping.count(alone(), 4) == 4


@pytest.mark.parametrize(
    "share, count, low, high", [(1.0, 4, 0.597, 1.0), (0.5, 100, 0.419, 0.581), (0.0, 0, 0.0, 1.0)]
)
def test_the_interval_is_wide_for_few_groups(share: float, count: int, low: float, high: float) -> None:
    assert grouping.interval(share, count) == pytest.approx((low, high), abs=0.001)


def test_few_groups_are_remarked_and_few_pictures_are_not() -> None:
    assert (
        grouping.few(120, 4) == "120 pictures come from 4 scenes: the accuracy is an estimate from few scenes"
    )
    assert "1 scene:" in grouping.few(9, 1)
    assert not grouping.few(8, 8) and not grouping.few(900, 300) and not grouping.few(12, 0)


def test_classes_of_a_single_group_cannot_be_measured() -> None:
    y, given = np.array([0, 0, 1, 1, 2]), np.array([0, 0, 1, 2, 3])
    assert grouping.single(y, given).tolist() == [0] and not len(grouping.single(y, alone()))
