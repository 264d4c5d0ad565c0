"""Bounds of class statistics: nothing that honest devices send is outside them, and what one device alone can add is bounded."""

from collections.abc import Callable

import numpy as np
import pytest

from edge_fl.errors import StatisticsError
from edge_fl.heads.class_statistics import bounds, sums
from edge_fl.heads.class_statistics.bounds import Senders
from edge_fl.heads.class_statistics.sums import MOST_PER_CLASS, Shape, Statistics
from edge_fl.secure import fixed_point

CLASSES, DIM = 4, 150
Change = Callable[[Statistics], None]


def device(seed: int, dim: int = DIM, classes: int = CLASSES) -> Statistics:
    """Honest statistics: of many pictures or few, of all classes or two."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rng.integers(3, 40)) if seed % 3 else np.repeat(np.arange(2), (60, 1))
    y[:2] = (0, 1)
    z = (rng.normal(size=(classes, dim))[y] + rng.normal(size=(len(y), dim))).astype(np.float32)
    rows = sums.uncounted(sums.keys_of(z), y, {})
    return sums.of(z, y, classes, rows)


def rebuilt(vector: np.ndarray, shape: Shape) -> Statistics:
    return sums.from_flat(vector, shape)


@pytest.mark.parametrize("dim", [16, 150, 1280])
@pytest.mark.parametrize("clip", [0.0, 3.0, 1000.0])
def test_whatever_honest_devices_send_is_possible(dim: int, clip: float) -> None:
    each = [device(seed, dim) for seed in range(30)]
    vectors = [fixed_point.clipped(found.flat, clip) for found in each]
    for vector in vectors:
        bounds.require_possible(rebuilt(vector, each[0].shape), Senders(1, clip), dim)
    bounds.require_possible(rebuilt(np.sum(vectors, axis=0), each[0].shape), Senders(30, clip), dim)


@pytest.mark.parametrize("dim", [4, 16, 150, 1280])
def test_what_a_release_rounds_stays_possible(dim: int) -> None:
    each = [device(seed, dim) for seed in range(6)]
    for found in (each[1], each[3], rebuilt(np.sum([one.flat for one in each], axis=0), each[0].shape)):
        for _ in range(50):
            found = sums.from_arrays(found.arrays())
        bounds.require_possible(found, Senders(6), dim)


def test_sums_that_are_projected_are_possible_too() -> None:
    each = [device(seed, 600, 300) for seed in range(4)]
    assert each[0].shape.width < 600
    bounds.require_possible(rebuilt(sum(one.flat for one in each), each[0].shape), Senders(4), 600)


@pytest.mark.parametrize("scale", [0.01, 0.3, 5.0])
def test_noise_alone_is_never_outside(scale: float) -> None:
    rng, each = np.random.default_rng(1), [fixed_point.clipped(device(seed).flat, 10.0) for seed in range(8)]
    shape = device(0).shape
    for _ in range(200):
        vector = np.sum(each, axis=0) + scale * rng.normal(size=shape.length)
        bounds.require_possible(rebuilt(vector, shape), Senders(8, 10.0, scale), DIM)


def shorter(found: Statistics) -> None:
    found.sums[1] *= 1.2 * found.counts[1] / np.linalg.norm(found.sums[1])


def part(found: Statistics) -> None:
    found.counts[2] += 0.5


def negative(found: Statistics) -> None:
    found.counts[0] = -1


def empty(found: Statistics) -> None:
    found.counts[:] = 0
    found.sums[:] = 0


def long(found: Statistics) -> None:
    found.moment[np.diag_indices(len(found.moment))] += 10


def indefinite(found: Statistics) -> None:
    found.moment[0, 0] -= 5


def without_scatter(found: Statistics) -> None:
    found.moment[:] = np.eye(len(found.moment)) * 1e-6  # the between-class part of the sums is missing


def many(found: Statistics) -> None:
    found.counts[3] = 2 * MOST_PER_CLASS + 1


def thousands(found: Statistics) -> None:
    found.counts[:] = 5000
    found.sums[3] *= -5000 / np.linalg.norm(found.sums[3])


def far_centre(found: Statistics) -> None:
    found.centre[:] *= 1.1 * found.counts.sum() / np.linalg.norm(found.centre)


CHANGES: list[tuple[Change, str]] = [
    (shorter, r"class 1: a sum of length \d+.* features of length 1; they were not used"),
    (part, r"class 2: count \d+\.5, expected a whole number"),
    (negative, "class 0: count -1, expected a whole number"),
    (empty, "no picture is counted"),
    (long, "second moment with trace"),
    (indefinite, "second moment with eigenvalue -.* after its part between the classes"),
    (without_scatter, "second moment with eigenvalue -.* after its part between the classes"),
    (far_centre, r"a centre of length \d+.* of \d+ directions of length 1; they were not used"),
    (many, "class 3: count 65 from 2 devices, expected at most 64: 32 of each"),
    (thousands, "class 0: count 5000 from 2 devices, expected at most 64"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_what_no_two_devices_can_send_is_named(change: Change, message: str) -> None:
    found = rebuilt(device(1).flat + device(2).flat, device(1).shape)
    bounds.require_possible(found, Senders(2), DIM)
    change(found)
    with pytest.raises(StatisticsError, match=message):
        bounds.require_possible(found, Senders(2), DIM)


@pytest.mark.parametrize(
    "change", [shorter, negative, long, far_centre, many, thousands], ids=lambda change: str(change.__name__)
)
def test_clipped_statistics_have_the_same_bounds(change: Change) -> None:
    found = rebuilt(device(1).flat + device(2).flat, device(1).shape)
    change(found)
    with pytest.raises(StatisticsError):
        bounds.require_possible(found, Senders(2, clip=1000.0), DIM)


@pytest.mark.parametrize(("place", "value"), [(0, 40.0), (3, -8.0), (CLASSES + 5, 60.0)])
def test_with_noise_a_device_can_add_what_the_noise_hides_and_no_more(place: int, value: float) -> None:
    shape = device(1).shape
    vector = fixed_point.clipped(device(1).flat, 5.0) + fixed_point.clipped(device(2).flat, 5.0)
    vector[place] += value
    bounds.require_possible(rebuilt(vector, shape), Senders(2, 1000.0, 20.0), DIM)
    with pytest.raises(StatisticsError):
        bounds.require_possible(rebuilt(vector, shape), Senders(2, 5.0, 0.5), DIM)


def test_the_norm_of_clipped_vectors_is_bounded() -> None:
    found = rebuilt(device(1).flat + device(2).flat, device(1).shape)
    clip = float(np.linalg.norm(found.flat)) / 2
    bounds.require_possible(found, Senders(2, clip=clip), DIM)
    with pytest.raises(StatisticsError, match=r"norm .* of 2 vectors clipped to .* each"):
        bounds.require_possible(found, Senders(2, clip=0.9 * clip), DIM)
