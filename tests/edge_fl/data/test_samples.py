"""Samples are checked where they are made; foreign arrays are converted or refused in one line."""

import numpy as np
import pytest

from edge_fl.data.samples import Dataset, Samples, as_labels, class_ids
from edge_fl.errors import DataError
from edge_fl.modalities import pictures


def some(n: int = 3, shape: tuple[int, int, int] = (1, 2, 2)) -> Samples:
    x = np.arange(n * int(np.prod(shape)), dtype=np.uint8).reshape(n, *shape)
    return Samples(x, np.arange(n, dtype=np.int64))


def test_taking_keeps_images_and_labels_together() -> None:
    taken = some().take(np.array([2, 0]))
    assert taken.y.tolist() == [2, 0]
    assert taken.x[:, 0, 0, 0].tolist() == [8, 0]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            np.zeros((2, 1, 2, 2), np.float32),
            np.zeros(2, np.int64),
            r"float32 \[2, 1, 2, 2\], expected uint8",
        ),
        (np.zeros((2, 2, 2), np.uint8), np.zeros(2, np.int64), r"expected uint8 \[N, C, H, W\]"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.zeros(3, np.int64), r"expected int64 \[2\]"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.array([0, -1]), "label -1 at index 1"),
    ],
)
def test_samples_of_the_wrong_form_are_refused(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Samples(x, y)


def test_a_fingerprint_tells_content_apart_and_nothing_else() -> None:
    same = Samples(some().x.copy(order="F"), some().y)
    relabelled = Samples(some().x, some().y[::-1].copy())
    reshaped = Samples(some().x.reshape(3, 1, 1, 4), some().y)
    assert some().fingerprint() == same.fingerprint()
    assert len({some().fingerprint(), relabelled.fingerprint(), reshaped.fingerprint()}) == 3


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ((5, 4, 4), (1, 4, 4)),
        ((5, 4, 4, 1), (1, 4, 4)),
        ((5, 4, 6, 3), (3, 4, 6)),
        ((5, 3, 4, 6), (3, 4, 6)),
        ((0, 4, 4), (1, 4, 4)),
    ],
)
def test_images_end_with_channels_first(given: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    assert pictures.arrays(np.zeros(given, np.uint8), "here").shape == (given[0], *shape)


def test_channels_last_are_moved_not_reshaped() -> None:
    x = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    assert pictures.arrays(x, "here")[0, 1].tolist() == [[1, 4], [7, 10]]


def test_floats_from_0_to_1_become_grey_levels_and_other_ranges_are_refused() -> None:
    assert pictures.arrays(np.array([[[0.0, 0.5, 1.0]]]), "here").ravel().tolist() == [0, 128, 255]
    assert pictures.arrays(np.array([[[0, 255]]]), "here").ravel().tolist() == [0, 255]
    for wrong in ([[[0.0, 1.5]]], [[[-0.1, 0.5]]], [[[np.nan, 0.5]]], [[[0, 256]]]):
        with pytest.raises(DataError, match=r"here: .*images range over .*expected 0\.\."):
            pictures.arrays(np.array(wrong), "here")


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 4)),
        np.zeros((2, 4, 4, 2), np.uint8),
        np.zeros((2, 4, 4), bool),
        np.zeros((2, 4, 4), "U1"),
    ],
)
def test_arrays_that_are_no_images_are_refused(x: np.ndarray) -> None:
    with pytest.raises(DataError, match="here: images"):
        pictures.arrays(x, "here")


def test_a_label_outside_the_class_list_names_file_index_label_and_classes() -> None:
    with pytest.raises(
        DataError,
        match=r"photos\.npz: label 2 at index 1 \(1 such labels\) is outside the 2 classes 0\.\.1 \(cat, dog\)",
    ):
        as_labels(np.array([0, 2, 1]), ("cat", "dog"), "photos.npz")


@pytest.mark.parametrize(
    "y", [np.array([0.5]), np.array([[0, 1]]), np.array([-1]), np.array([10**12]), np.array(["cat"])]
)
def test_labels_that_are_no_class_ids_are_refused(y: np.ndarray) -> None:
    with pytest.raises(DataError, match="label"):
        class_ids(y, "here")


def test_mean_and_std_are_those_of_the_original_training_pixels() -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 4)).astype(np.uint8)
    held_out = np.array([False] * 4 + [True] * 2)
    dataset = Dataset("toy", Samples(x, np.zeros(6, np.int64)), ("only",), held_out)
    assert dataset.input.mean == pytest.approx((x[:4] / 255).mean(axis=(0, 2, 3)), abs=1e-6)
    assert dataset.input.std == pytest.approx((x[:4] / 255).std(axis=(0, 2, 3)), abs=1e-6)
    assert dataset.input.shape == (3, 4, 4)


def test_flat_images_have_a_std_that_can_be_divided_by() -> None:
    flat = Samples(np.full((2, 1, 2, 2), 7, np.uint8), np.zeros(2, np.int64))
    assert Dataset("flat", flat, ("only",)).input.std[0] > 0
