"""Class statistics: sums that add up, fit into their message, and are checked against their counts."""

import numpy as np
import pytest

from edge_fl.errors import StatisticsError
from edge_fl.heads.class_statistics import bounds, sums
from edge_fl.heads.class_statistics.bounds import Senders
from edge_fl.heads.class_statistics.sums import MAX_BYTES, NUMBER_BYTES, Shape, Statistics
from edge_fl.heads.linear import direction
from edge_fl.wire import tensors

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
    v = direction(z).astype(float)
    centre = np.mean([v[y == label].mean(axis=0) for label in range(CLASSES)], axis=0)
    assert found.centre == pytest.approx(30 * centre)


def test_some_pictures_are_counted_with_the_centre_of_all() -> None:
    z, y = pictures(0)
    parts = [sums.of(z, y, CLASSES, rows).flat for rows in np.split(np.arange(len(y)), [11])]
    assert sum(parts) == pytest.approx(sums.of(z, y, CLASSES).flat)


def test_the_sum_of_vectors_is_the_sum_of_statistics_and_survives_the_fixed_point() -> None:
    vectors = [np.round(sums.of(*pictures(seed), CLASSES).flat * 2**24) / 2**24 for seed in range(5)]
    total = sums.from_flat(sum(vectors), sums.shape_of(CLASSES, DIM))
    assert total.counts.tolist() == [40, 40, 35, 35]
    again = sums.from_arrays(total.addends())
    assert again.flat == pytest.approx(total.flat, abs=1e-4)
    assert np.array_equal(again.moment, again.moment.T)


def fleet(seeds: range) -> Statistics:
    """The sum over the devices of these seeds, with different numbers of pictures."""
    vectors = [sums.of(*pictures(seed, 20 + 7 * seed), CLASSES).flat for seed in seeds]
    return sums.from_flat(np.sum(vectors, axis=0), sums.shape_of(CLASSES, DIM))


def test_an_extra_minus_one_device_is_that_of_the_others_within_half_precision() -> None:
    found = sums.from_arrays(fleet(range(5)).arrays()).without(fleet(range(4, 5)))
    expected = fleet(range(4))
    assert np.array_equal(found.counts, expected.counts)
    total = fleet(range(5)).counts.sum()
    for name in ("sums", "moment", "centre"):
        error = np.abs(getattr(found, name) - getattr(expected, name))
        largest = np.abs(getattr(fleet(range(5)), name))
        assert (error <= largest / 2**11 + total * 2**-24).all(), name


def test_an_extra_of_a_million_devices_does_not_overflow() -> None:
    one = fleet(range(5))
    many = sums.from_flat(one.flat * 200_000, one.shape)
    found = sums.from_arrays(many.arrays())
    assert np.array_equal(found.counts, many.counts)
    assert found.sums == pytest.approx(many.sums, rel=2**-11, abs=many.counts.max() * 2**-24)


def test_an_extra_of_noise_alone_is_finite() -> None:
    shape = sums.shape_of(CLASSES, DIM)
    noise = sums.from_flat(1e5 * np.random.default_rng(0).normal(size=shape.length), shape)
    noise.counts[:] = 0.01
    assert np.isfinite(sums.from_arrays(noise.arrays()).flat).all()


@pytest.mark.parametrize(("classes", "dim"), [(2, 1280), (7, 1280), (100, 1280), (10, 64), (3, 512)])
def test_an_extra_has_at_most_4_bytes_for_each_class_and_dimension(classes: int, dim: int) -> None:
    shape = sums.shape_of(classes, dim)
    found = sums.from_flat(np.ones(shape.length), shape).arrays()
    assert len(tensors.pack({"prior": found})) <= 4 * classes * dim + 400


@pytest.mark.parametrize(("classes", "dim"), [(3, 300), (30, 1280), (2, 16)])
def test_statistics_of_a_longer_list_of_classes_stay_sums(classes: int, dim: int) -> None:
    rng = np.random.default_rng(0)
    each = []
    for _ in range(3):
        z = np.abs(rng.normal(size=(60, dim))).astype(np.float32)
        each.append(sums.of(z, np.arange(60) % classes, classes))
    shape = sums.shape_of(classes + 2, dim)
    assert shape != each[0].grown(classes + 2).shape or dim == 16
    parts = [one.resized(shape).flat for one in each]
    total = sums.from_flat(sum(one.flat for one in each), each[0].shape).resized(shape)
    assert total.shape == shape and sum(parts) == pytest.approx(total.flat)
    assert total.without(each[0]).flat == pytest.approx(parts[1] + parts[2])
    assert total.counts.tolist() == [*sum(one.counts for one in each), 0, 0]
    assert np.linalg.eigvalsh(total.moment)[0] > -1e-9
    assert np.trace(total.moment) < total.counts.sum()
    with pytest.raises(StatisticsError, match="expected Shape"):
        total.resized(each[0].shape)


@pytest.mark.parametrize(
    ("classes", "dim", "projected"),
    [(7, 1280, 120), (10, 1280, 128), (100, 1280, 128), (10, 512, 91), (2, 8, 8), (500, 768, 128)],
)
def test_a_message_has_at_most_200_kb(classes: int, dim: int, projected: int) -> None:
    shape = sums.shape_of(classes, dim)
    assert shape.length * NUMBER_BYTES <= MAX_BYTES
    assert (shape.width == dim) == (classes <= 10)
    assert shape.projected == projected


@pytest.mark.parametrize(("classes", "dim"), [(5000, 1280), (2, 40_000)])
def test_too_many_classes_or_features_are_an_error(classes: int, dim: int) -> None:
    with pytest.raises(
        StatisticsError, match=rf"^{classes} classes and {dim} features: a message of 200000 bytes holds \d"
    ):
        sums.shape_of(classes, dim)


def test_pictures_of_one_class_are_an_error() -> None:
    z, y = pictures(0)
    with pytest.raises(StatisticsError, match="pictures of 1 class, expected 2 or more"):
        sums.of(z[y == 1], y[y == 1], CLASSES)


@pytest.mark.parametrize("dim", [100, 300])
def test_left_out_classes_leave_the_statistics_of_the_others(dim: int) -> None:
    z, y = (part[:dim] if part.ndim == 1 else part[:, :dim] for part in pictures(0))
    y = y[: len(z)]
    found = sums.of(z, y, CLASSES)
    less = found.left_out(np.array([1, 3]))
    assert less.counts.tolist() == [8, 0, 7, 0]
    assert np.array_equal(less.sums[[0, 2]], found.sums[[0, 2]]) and not less.sums[[1, 3]].any()
    others = sums.of(z, y, CLASSES, np.flatnonzero(y % 2 == 0)).moment
    scatter = less.moment - others  # what is left of the classes: their pictures around the means
    assert np.linalg.eigvalsh(scatter)[0] > -1e-9
    inner = sums.project(found.sums[[1, 3]], found.shape.projected)
    counts = found.counts[[1, 3]]
    expected = found.moment - others - inner.T @ (inner / counts[:, None])
    assert scatter == pytest.approx(expected)
    assert less.centre == pytest.approx(found.centre * less.counts.sum() / found.counts.sum())
    assert found.left_out(np.array([], int)) is found
    assert not found.left_out(np.arange(CLASSES)).flat.any()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_left_is_what_pictures_can_have(seed: int) -> None:
    rng, classes, dim = np.random.default_rng(seed), 3, 4
    z, y = rng.normal(size=(40, dim)).astype(np.float32), np.arange(40) % classes
    found = sums.of(z, y, classes)
    assert found.shape.projected == dim
    for label in range(classes):
        less = found.left_out(np.array([label]))
        bounds.require_possible(less, Senders(1), dim)
        assert np.trace(less.moment) == pytest.approx(less.counts.sum())


@pytest.mark.parametrize("width", [1, 7, 128, 299, 300])
def test_the_projection_has_orthonormal_columns_and_lift_is_its_transpose(width: int) -> None:
    columns = sums.project(np.eye(DIM), width)
    assert columns.T @ columns == pytest.approx(np.eye(width))
    assert sums.lift(np.eye(width), DIM) == pytest.approx(columns.T)


def test_the_projection_is_the_same_on_every_machine() -> None:
    found = sums.project(np.arange(1.0, 6.0)[None], 2)
    assert found == pytest.approx(np.array([[-2.309401076758503, -0.7071067811865475]]))


def test_a_vector_of_another_length_or_with_nan_is_an_error() -> None:
    shape, vector = Shape(2, 4, 4, 4), np.ones(24)
    for wrong in (vector[:-1], np.where(np.arange(24) == 3, np.nan, vector), vector.reshape(4, 6)):
        with pytest.raises(StatisticsError, match="expected 24"):
            sums.from_flat(wrong, shape)


@pytest.mark.parametrize("form", ["arrays", "addends"])
@pytest.mark.parametrize("broken", [0, 1, 2, "centre", "more", "flat", "other"])
def test_arrays_of_a_damaged_extra_are_an_error(form: str, broken: int | str) -> None:
    arrays = getattr(sums.of(*pictures(0), CLASSES), form)()
    names = list(arrays)
    match broken:
        case "more":
            arrays["another"] = arrays["count"]
        case "flat":
            arrays[names[1]] = arrays[names[1]].ravel()
        case "centre":
            arrays[names[3]] = arrays[names[3]][None]
        case "other":
            arrays["x"] = arrays.pop(names[3])
        case int():
            arrays[names[broken]] = arrays[names[broken]][1:]
    with pytest.raises(StatisticsError):
        sums.from_arrays(arrays)
