"""Class statistics: sums that add up, fit into their message, and are checked against their counts."""

import numpy as np
import pytest

from edge_fl.errors import StatisticsError
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.sums import MAX_BYTES, NUMBER_BYTES, Shape
from edge_fl.heads.linear import direction

CLASSES, DIM = 4, 300


def pictures(seed: int, n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return np.abs(rng.normal(size=(n, DIM))).astype(np.float32), np.arange(n) % CLASSES


def test_they_are_sums_of_centred_features_of_length_1() -> None:
    z, y = pictures(0)
    found = sums.of(z, y, CLASSES)
    u = direction(z).astype(float)
    u -= np.mean([u[y == label].mean(axis=0) for label in range(CLASSES)], axis=0)
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    assert found.counts.tolist() == [8, 8, 7, 7]
    assert found.sums == pytest.approx(np.stack([u[y == label].sum(axis=0) for label in range(CLASSES)]))
    q = sums.project(u, found.shape.projected)
    assert found.moment == pytest.approx(q.T @ q)


def test_some_pictures_are_counted_with_the_centre_of_all() -> None:
    z, y = pictures(0)
    parts = [sums.of(z, y, CLASSES, rows).flat for rows in np.split(np.arange(len(y)), [11])]
    assert sum(parts) == pytest.approx(sums.of(z, y, CLASSES).flat)


def test_the_sum_of_vectors_is_the_sum_of_statistics_and_survives_the_fixed_point() -> None:
    vectors = [np.round(sums.of(*pictures(seed), CLASSES).flat * 2**24) / 2**24 for seed in range(5)]
    total = sums.from_flat(sum(vectors), sums.shape_of(CLASSES, DIM))
    assert total.counts.tolist() == [40, 40, 35, 35]
    again = sums.from_arrays(total.arrays())
    assert again.flat == pytest.approx(total.flat, abs=1e-4)
    assert np.array_equal(again.moment, again.moment.T)


@pytest.mark.parametrize(
    ("classes", "dim"), [(7, 1280), (10, 1280), (100, 1280), (10, 512), (2, 8), (500, 768)]
)
def test_a_message_has_at_most_200_kb(classes: int, dim: int) -> None:
    shape = sums.shape_of(classes, dim)
    assert shape.length * NUMBER_BYTES <= MAX_BYTES
    assert (shape.width == dim) == (classes <= 10)
    assert shape.projected == min(dim, 128)


def test_too_many_classes_are_an_error() -> None:
    with pytest.raises(
        StatisticsError, match=r"^5000 classes: a message of 200000 bytes holds 4 numbers of each"
    ):
        sums.shape_of(5000, 1280)


def test_pictures_of_one_class_are_an_error() -> None:
    z, y = pictures(0)
    with pytest.raises(StatisticsError, match="pictures of 1 class, expected 2 or more"):
        sums.of(z[y == 1], y[y == 1], CLASSES)


@pytest.mark.parametrize("dim", [100, 300])
def test_left_out_classes_leave_the_statistics_of_the_others(dim: int) -> None:
    z, y = (part[:dim] if part.ndim == 1 else part[:, :dim] for part in pictures(0))
    y = y[: len(z)]
    found = sums.of(z, y, CLASSES)
    less = found.left_out(np.array([1, 3]), dim)
    assert less.counts.tolist() == [8, 0, 7, 0]
    assert np.array_equal(less.sums[[0, 2]], found.sums[[0, 2]]) and not less.sums[[1, 3]].any()
    others = sums.of(z, y, CLASSES, np.flatnonzero(y % 2 == 0)).moment
    scatter = less.moment - others  # what is left of the classes: their pictures around the means
    assert np.linalg.eigvalsh(scatter)[0] > -1e-9
    inner = sums.project(found.sums[[1, 3]], found.shape.projected)
    counts = found.counts[[1, 3]]
    expected = found.moment - others - inner.T @ (inner / counts[:, None])
    assert scatter == pytest.approx(expected)
    assert found.left_out(np.array([], int), dim) is found


@pytest.mark.parametrize("width", [1, 7, 128, 299, 300])
def test_the_projection_has_orthonormal_columns_and_lift_is_its_transpose(width: int) -> None:
    columns = sums.project(np.eye(DIM), width)
    assert columns.T @ columns == pytest.approx(np.eye(width))
    assert sums.lift(np.eye(width), DIM) == pytest.approx(columns.T)


def test_the_projection_is_the_same_on_every_machine() -> None:
    found = sums.project(np.arange(1.0, 6.0)[None], 2)
    assert found == pytest.approx(np.array([[-2.309401076758503, -0.7071067811865475]]))


def test_a_vector_of_another_length_or_with_nan_is_an_error() -> None:
    shape, vector = Shape(2, 4, 4), np.ones(20)
    for wrong in (vector[:-1], np.where(np.arange(20) == 3, np.nan, vector), vector.reshape(4, 5)):
        with pytest.raises(StatisticsError, match="expected 20"):
            sums.from_flat(wrong, shape)


@pytest.mark.parametrize("broken", ["count", "sums", "moment", "more", "flat"])
def test_arrays_of_a_damaged_extra_are_an_error(broken: str) -> None:
    arrays = sums.of(*pictures(0), CLASSES).arrays()
    if broken == "more":
        arrays["other"] = arrays["count"]
    elif broken == "flat":
        arrays["sums"] = arrays["sums"].ravel()
    else:
        arrays[broken] = arrays[broken][1:]
    with pytest.raises(StatisticsError):
        sums.from_arrays(arrays)
