"""Calibration from out-of-fold predictions: probabilities, thresholds and rejections hold on samples that no head has seen."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.errors import ArtefactError
from edge_fl.heads import probability_calibration
from edge_fl.heads.auto import CANDIDATES
from edge_fl.heads.head import Features, Head
from edge_fl.heads.linear import direction
from edge_fl.heads.probability_calibration import LEAST, UNCALIBRATED, Calibration, calibrate

DIM, CLASSES = 64, 5
CENTRES = np.random.default_rng(0).normal(size=(CLASSES, DIM))


def some(
    per_class: int, seed: int, classes: int = CLASSES, noise: float = 4
) -> tuple[Features, NDArray[np.int64]]:
    """Overlapping classes: about four of five samples are classified correctly."""
    y = np.repeat(np.arange(classes), per_class)
    errors = np.random.default_rng(seed).normal(size=(len(y), DIM))
    return (CENTRES[y] + noise * errors).astype(np.float32), y


def fit(kind: str, z: Features, y: NDArray[np.int64]) -> Head:
    return heads.fit(kind, z, y, CLASSES, unit_norm=False)


def fitted(kind: str, per_class: int = 40, seed: int = 1) -> tuple[Head, Calibration]:
    z, y = some(per_class, seed)
    return fit(kind, z, y), calibrate(lambda z, y: fit(kind, z, y), z, y)


def error(confidence: Features, right: NDArray[np.bool_], bins: int = 15) -> float:
    """Expected calibration error with equal-width bins."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(confidence[place == b].sum() - right[place == b].sum()) for b in range(bins)]
    return float(sum(gaps) / len(right))


@pytest.mark.parametrize("kind", CANDIDATES)
def test_probabilities_are_as_frequently_right_as_they_say(kind: str) -> None:
    z, y = some(400, 2)
    head, calibrated = fitted(kind)
    logits = head.logits(z)
    raw, better = UNCALIBRATED.probabilities(logits), calibrated.probabilities(logits)
    assert (
        np.array_equal(raw.argmax(axis=1), better.argmax(axis=1))
        and 0.4 < (better.argmax(1) == y).mean() < 0.95
    )
    assert error(better.max(axis=1), better.argmax(axis=1) == y) <= 0.08
    if kind == "logistic":
        assert error(raw.max(axis=1), raw.argmax(axis=1) == y) > 0.08


@pytest.mark.parametrize("target", [0.8, 0.9])
def test_sets_keep_their_promise_on_unseen_samples(target: float) -> None:
    z, y = some(400, 2)
    covered, sizes, right = [], [], []
    for seed in range(8):
        head, calibrated = fitted("cosine", seed=10 + seed)
        sets = calibrated.promise.sets(head.logits(z), target)
        covered.append(sets[np.arange(len(y)), y].mean())
        sizes.append(sets.sum(axis=1).mean())
        right.append((head.logits(z).argmax(axis=1) == y).mean())
    assert np.mean(right) < target <= np.mean(covered) <= target + 0.06 and min(covered) > target - 0.04
    assert np.mean(sizes) < 2.7


def test_too_few_samples_give_no_rejection() -> None:
    z, y = some(3, 1)
    calibrated = calibrate(lambda z, y: fit("cosine", z, y), z, y)
    assert 0 < len(calibrated.right) < LEAST and calibrated.temperature > 0
    assert not calibrated.percentiles(100 * z, y).any()


def test_unknown_samples_are_far_and_few_known_ones_are() -> None:
    z, y = some(40, 1, noise=1)
    calibrated = calibrate(lambda z, y: fit("cosine", z, y), z, y)
    (known, y), unknown = some(400, 2, noise=1), -some(400, 3, noise=1)[0]
    assert (calibrated.percentiles(known, y) > 0.95).mean() < 0.08
    assert (calibrated.percentiles(unknown, y) > 0.95).mean() > 0.5
    assert not calibrated.percentiles(unknown, np.full(len(y), CLASSES)).any()  # a class without labels


def test_samples_whose_class_the_other_folds_lack_do_not_count() -> None:
    z, y = some(6, 1, classes=4)
    z, y = np.concatenate([z, z[:1]]), np.append(y, 4)
    calibrated = calibrate(lambda z, y: fit("cosine", z, y), z, y)
    assert len(calibrated.right) == 24 and len(calibrated.known.means) == 5


def test_a_single_class_is_not_calibrated() -> None:
    z, _ = some(6, 1)
    assert calibrate(lambda z, y: fit("cosine", z, y), z, np.zeros(len(z), np.int64)) is UNCALIBRATED


def test_the_budget_ends_after_a_fold() -> None:
    z, y = some(40, 1)
    calibrated = calibrate(lambda z, y: fit("cosine", z, y), z, y, budget_s=-1)
    assert len(calibrated.right) == len(y) / probability_calibration.FOLDS


def test_arrays_describe_the_calibration_and_an_old_file_has_none() -> None:
    _, calibrated = fitted("cosine")
    again = probability_calibration.from_arrays(calibrated.to_arrays())
    z, y = some(5, 2)
    logits = np.random.default_rng(0).normal(0, 1, (50, 3)).astype(np.float32)
    assert np.array_equal(again.promise.sets(logits, 0.9), calibrated.promise.sets(logits, 0.9))
    assert np.isclose(again.temperature, calibrated.temperature)
    assert np.array_equal(again.percentiles(z, y), calibrated.percentiles(z, y))
    assert probability_calibration.from_arrays({}) is UNCALIBRATED


def test_a_file_without_the_classes_of_its_means_is_read_and_calls_nothing_unknown() -> None:
    _, calibrated = fitted("cosine")
    old = {name: array for name, array in calibrated.to_arrays().items() if name != "classes"}
    z, y = some(5, 2)
    found = probability_calibration.from_arrays(old)
    assert np.isclose(found.temperature, calibrated.temperature) and not found.percentiles(-z, y).any()
    assert calibrated.percentiles(-z, y).max() > 0.95


@pytest.mark.parametrize(
    "damage",
    [
        {"classes": np.arange(2)},
        {"apart": np.zeros(2, np.float32)},
        {"temperature": np.zeros(1, np.float32)},
        {"confidences": np.zeros(3, np.float32)},
        {"means": np.full((2, 3), np.nan, np.float32)},
        {"right": np.zeros(3, np.float32)},
    ],
)
def test_damaged_arrays_are_rejected(damage: dict[str, np.ndarray]) -> None:
    _, calibrated = fitted("cosine")
    with pytest.raises(ArtefactError, match="calibration"):
        probability_calibration.from_arrays({**calibrated.to_arrays(), **damage})


def test_the_cosine_head_solves_the_regression_in_either_form() -> None:
    """With more samples than dimensions the primal form is used; duplicated samples with half the weight give the same head."""
    z, y = some(20, 1)
    narrow, wide = z[:, :32], np.tile(z[:, :32], 5)
    assert len(z) > narrow.shape[1] and len(z) < wide.shape[1]
    found = [fit("cosine", features, y).predict(features) for features in (narrow, wide)]
    assert np.array_equal(*found)


def test_the_cosine_head_knows_only_its_classes_and_ignores_the_length() -> None:
    z, y = some(20, 1, classes=3)
    head = fit("cosine", z, y)
    logits = head.logits(z)
    assert np.isneginf(logits[:, 3:]).all() and np.isfinite(logits[:, :3]).all()
    assert np.allclose(head.logits(9 * z)[:, :3], logits[:, :3], atol=1e-4)
    assert np.allclose(np.linalg.norm(direction(z), axis=1), 1, atol=1e-5)


def test_balanced_samples_weigh_as_if_they_were_repeated() -> None:
    z, y = some(8, 1, classes=2)
    few = np.r_[0:8, 8:10]
    repeated = np.r_[0:8, np.tile([8, 9], 4)]
    balanced = heads.fit("cosine", z[few], y[few], 2, unit_norm=False, balanced=True)
    twice = heads.fit("cosine", z[repeated], y[repeated], 2, unit_norm=False)
    assert (balanced.predict(z) == twice.predict(z)).mean() > 0.9


def test_scenes_count_once_and_are_kept_in_the_file() -> None:
    z, y = some(24, 1, classes=3)
    frames, scenes = np.repeat(z, 10, axis=0), np.repeat(np.arange(len(y)), 10)
    calibrated = calibrate(lambda z, y: fit("cosine", z, y), frames, np.repeat(y, 10), scenes)
    alone = calibrate(lambda z, y: fit("cosine", z, y), z, y)
    assert calibrated.scenes == len(y) and len(calibrated.right) == 10 * len(y)
    assert abs(calibrated.accuracy - alone.accuracy) < 0.1 and calibrated.accuracy < 1
    assert calibrated.interval[1] - calibrated.interval[0] > 0.1
    again = probability_calibration.from_arrays(calibrated.to_arrays())
    assert again.scenes == len(y)
    assert "groups" not in alone.to_arrays()
    with pytest.raises(ArtefactError, match="differ in length"):
        probability_calibration.from_arrays({**calibrated.to_arrays(), "groups": scenes[1:]})


def test_an_accuracy_by_chance_is_not_shown_higher_because_labels_were_few() -> None:
    """Leaving one of three labels of a class out costs nothing where labels teach nothing."""
    classes, shown = 8, list[float]()
    for seed in range(30):
        z = np.random.default_rng(seed).normal(size=(3 * classes, DIM)).astype(np.float32)
        y = np.repeat(np.arange(classes), 3)
        head = calibrate(lambda z, y: heads.fit("cosine", z, y, classes, unit_norm=False), z, y)
        shown.append(head.accuracy)
    assert abs(np.mean(shown) - 1 / classes) < 0.06


def test_an_error_that_falls_fast_is_lower_with_all_labels_than_without_a_fold() -> None:
    z, y = some(3, 4, noise=1.5)
    found = calibrate(lambda z, y: fit("cosine", z, y), z, y)
    right = replace(found, right=np.arange(15) % 15 > 0)
    assert right.correction < 1 and 14 / 15 < right.accuracy < 1


def test_frames_of_a_few_scenes_do_not_count_as_many_labels() -> None:
    z, y = some(4, 1, classes=3)
    frames, scenes = np.repeat(z, 30, axis=0), np.repeat(np.arange(len(y)), 30)
    together = calibrate(lambda z, y: fit("cosine", z, y), frames, np.repeat(y, 30), scenes)
    apart = calibrate(lambda z, y: fit("cosine", z, y), frames, np.repeat(y, 30))
    assert not together.percentiles(z, y).any()
    assert together.promise.masses[40] < apart.promise.masses[40]  # more careful
