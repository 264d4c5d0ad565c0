"""Samples of no class are far from the labelled ones, more so where samples without a label show what else there is."""

import numpy as np
import pytest

from edge_fl.heads import probability_calibration, training_set, unknowns
from edge_fl.heads.head import Features
from edge_fl.heads.probability_calibration import Calibration, calibrate, of_estimate
from edge_fl.heads.served import fit as fit_served
from edge_fl.heads.unknowns import KnownClasses

DIM, CLASSES, LOST = 64, 6, 5
CENTRES = np.random.default_rng(0).normal(size=(CLASSES, DIM))


def some(per_class: int, seed: int, classes: int = LOST, noise: float = 2.0) -> tuple[Features, np.ndarray]:
    """Positive features, as behind a rectifier."""
    y = np.repeat(np.arange(classes), per_class)
    errors = np.random.default_rng(seed).normal(size=(len(y), DIM))
    return np.maximum(CENTRES[y] + noise * errors, 0).astype(np.float32), y


def lost(count: int, seed: int) -> Features:
    """Samples of the class that has no label."""
    z, y = some(count, seed, CLASSES)
    return z[y == LOST]


def measured(pool: Features, per_class: int = 20, seed: int = 1) -> Calibration:
    z, y = some(per_class, seed)
    return of_estimate(fit_served(training_set(z, y, CLASSES, unit_norm=False)), with_pool(z, y, pool))


def with_pool(z: Features, y: np.ndarray, pool: Features, groups: np.ndarray | None = None):
    return training_set(z, y, CLASSES, unit_norm=False, unlabelled=pool, groups=groups)


def shares(calibrated: Calibration) -> tuple[float, float]:
    """Of unseen samples of the known classes and of the lost one: the share that is unknown at a false alarm rate of 5 %."""
    (z, y), other = some(200, 7), lost(400, 8)
    found = [calibrated.percentiles(z, y), calibrated.percentiles(other, np.zeros(len(other), np.int64))]
    return float((found[0] > 0.95).mean()), float((found[1] > 0.95).mean())


def test_false_alarms_are_as_frequent_as_allowed_and_samples_without_a_label_find_more() -> None:
    pool = np.concatenate([some(40, 3)[0], lost(40, 4)])
    alone, pooled = ([shares(measured(of, seed=seed)) for seed in range(1, 7)] for of in (pool[:0], pool))
    (false, found), (false_pooled, found_pooled) = np.mean(alone, axis=0), np.mean(pooled, axis=0)
    assert 0.02 < false < 0.075 and 0.02 < false_pooled < 0.075
    assert found > 0.2 and found_pooled > found + 0.15


def test_samples_without_a_label_that_are_all_known_change_nothing() -> None:
    pool, nothing = some(40, 3)[0], np.empty((0, DIM), np.float32)
    for seed in range(1, 5):
        given, alone = measured(pool, seed=seed), measured(nothing, seed=seed)
        assert not len(given.known.apart) and np.array_equal(given.distances, alone.distances)


def test_frames_of_one_scene_count_once() -> None:
    z, y = some(3, 1)
    frames, scenes = np.repeat(z, 20, axis=0), np.repeat(np.arange(len(y)), 20)
    data = with_pool(frames, np.repeat(y, 20), z[:0], scenes)
    calibrated = of_estimate(fit_served(data), data)
    assert calibrated.scenes == 15 and not calibrated.percentiles(lost(9, 2), np.zeros(9, np.int64)).any()
    z, y = some(20, 1)
    frames, scenes = np.repeat(z, 4, axis=0), np.repeat(np.arange(len(y)), 4)
    data = with_pool(frames, np.repeat(y, 4), z[:0], scenes)
    false, found = shares(of_estimate(fit_served(data), data))
    assert false < 0.12 and found > 0.15


def test_a_single_class_has_a_distance() -> None:
    z, y = some(40, 1, classes=1, noise=1)
    data = with_pool(z, y, some(10, 3)[0])
    calibrated = of_estimate(fit_served(data), data)
    assert np.isfinite(calibrated.distances).all()
    percentiles = calibrated.percentiles(some(20, 2, noise=1)[0], np.zeros(100, np.int64))
    assert (percentiles[:20] > 0.95).mean() < 0.2 and (percentiles[20:] > 0.95).mean() > 0.9


def test_a_kind_without_the_fleets_head_uses_samples_without_a_label_too() -> None:
    from edge_fl import heads

    z, y = some(20, 1)
    pool = np.concatenate([some(40, 3)[0], lost(40, 4)])
    given = calibrate(
        lambda z, y: heads.fit("nearest", z, y, CLASSES, unit_norm=False), z, y, unlabelled=pool
    )
    assert len(given.known.apart) == DIM
    again = probability_calibration.from_arrays(given.to_arrays())
    assert np.array_equal(
        again.percentiles(pool, np.zeros(len(pool), np.int64)),
        given.percentiles(pool, np.zeros(len(pool), np.int64)),
    )


@pytest.mark.parametrize("per_class", [1, 3])
def test_with_few_labels_nothing_is_unknown(per_class: int) -> None:
    calibrated = measured(lost(50, 4), per_class)
    assert not calibrated.percentiles(lost(9, 2), np.zeros(9, np.int64)).any()


def test_a_percentile_is_one_minus_a_conformal_p_value() -> None:
    found = unknowns.percentiles(
        np.arange(19, dtype=np.float32), np.ones(19), np.array([-1, 5.5, 99], np.float32)
    )
    assert np.allclose(found, [0, 6 / 20, 19 / 20])


def test_distances_do_not_depend_on_the_length_of_the_features() -> None:
    z, y = some(5, 1)
    known = KnownClasses(
        np.unique(y), np.stack([z[y == label].mean(axis=0) for label in range(LOST)]), z[0] * 0
    )
    assert np.allclose(known.distances(z), known.distances(3 * z), atol=1e-5)
    assert np.isfinite(known.distances(0 * z)).all()
