"""Prediction sets: coverage on unseen samples, what the fleet's survivals change, limits, and files."""

from itertools import pairwise

import numpy as np
import pytest

from edge_fl.errors import ArtefactError
from edge_fl.heads import promise as promises
from edge_fl.heads.promise import BINS, LEVELS, SURVIVALS, UNMEASURED

C = 5


def device(n: int, seed: int, confidence: float = 1.0, noise: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, C] and labels of samples, which are as probable as the logits divided by `confidence` say."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2 * noise, (n, C))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    y = np.array([rng.choice(C, p=row) for row in p])
    return (confidence * logits).astype(np.float32), y


def covered(found: promises.Promise, promise: float, seed: int, **kind: float) -> float:
    logits, y = device(4000, seed, **kind)
    return float(found.sets(logits, promise)[np.arange(len(y)), y].mean())


NO_SAMPLES = np.empty((0, C), np.float32)
NO_LABELS = np.empty(0, np.int64)


def fitted(labels: int, seed: int = 0, fleet: np.ndarray | None = None, **kind: float) -> promises.Promise:
    logits, y = device(labels, seed, **kind)
    return promises.of(logits, y, np.ones(labels), NO_SAMPLES, fleet=fleet)


@pytest.mark.parametrize("promise", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("labels", [10, 50, 200])
def test_sets_have_the_right_class_as_often_as_promised(labels: int, promise: float) -> None:
    found = [covered(fitted(labels, seed), promise, 100 + seed) for seed in range(20)]
    assert promise <= np.mean(found) <= promise + 0.04 and min(found) > promise - 0.1


def test_probabilities_that_are_too_sure_are_found_out_by_own_labels() -> None:
    few, many = (
        np.mean([covered(fitted(n, seed, confidence=3), 0.9, 50, confidence=3) for seed in range(10)])
        for n in (10, 1000)
    )
    assert few < 0.85 and many >= 0.88


def test_the_fleets_survivals_tell_a_device_without_labels_that_its_head_is_too_sure() -> None:
    logits, y = device(3000, 1, confidence=3)
    fleet = promises.histogram(promises.survivals(logits, y))
    unlabelled, _ = device(500, 2, confidence=3)
    alone, informed = (
        promises.of(NO_SAMPLES, NO_LABELS, np.empty(0), unlabelled, fleet=each) for each in (None, fleet)
    )
    assert covered(alone, 0.9, 3, confidence=3) < 0.8 < 0.9 <= covered(informed, 0.9, 3, confidence=3) < 0.96


def test_survivals_are_uniform_where_probabilities_are_right_however_hard_the_samples_are() -> None:
    for noise in (0.3, 1.0, 3.0):
        logits, y = device(4000, 4, noise=noise)
        v = promises.survivals(logits, y)
        assert abs(float((v < 0.1).mean()) - 0.1) < 0.02 and abs(float(v.mean()) - 0.5) < 0.02


def test_sets_grow_with_the_promise_and_are_never_empty() -> None:
    found, (logits, _) = fitted(50), device(200, 5)
    sets = [found.sets(logits, promise) for promise in (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.9999)]
    assert all((later >= earlier).all() for earlier, later in pairwise(sets))
    assert (sets[0].sum(axis=1) == 1).all() and sets[-1].all()
    assert (sets[0].argmax(axis=1) == logits.argmax(axis=1)).all()


def test_a_device_without_samples_has_sets_of_each_pictures_own_probabilities() -> None:
    assert 0.9 <= covered(UNMEASURED, 0.9, 6) <= 0.97
    logits, _ = device(100, 7)
    assert UNMEASURED.sets(logits, 0.9).sum(axis=1).min() == 1


def test_a_class_that_the_head_excludes_is_in_no_set() -> None:
    logits, _ = device(50, 8)
    logits[:, 2] = -np.inf
    for found in (fitted(50), UNMEASURED):
        for promise in (0.9, 0.99999):
            assert not found.sets(logits, promise)[:, 2].any()


def test_the_set_of_several_samples_of_one_class_is_that_of_their_mean() -> None:
    found, (logits, _) = fitted(100), device(40, 9)
    for row in logits:
        assert np.array_equal(found.of_mean(np.stack([row, row]), 0.9), found.sets(row[None], 0.9)[0])


def test_limits_are_kept_in_a_file_and_damage_is_named() -> None:
    for found in (fitted(50), UNMEASURED):
        again = promises.from_arrays(found.to_arrays())
        logits, _ = device(100, 10)
        assert np.array_equal(again.sets(logits, 0.9), found.sets(logits, 0.9))
    assert promises.from_arrays({}) is UNMEASURED
    arrays = fitted(50).to_arrays()
    for name, bad in (
        ("promise", arrays["promise"][:, 1:]),
        ("promise_temperature", np.zeros(1, np.float32)),
    ):
        with pytest.raises(ArtefactError, match=r"promise \[2, \d+\], expected \[1 or 2, 64\]"):
            promises.from_arrays({**arrays, name: bad})


def test_a_fleets_histogram_that_cannot_be_one_is_refused() -> None:
    assert promises.received({}, labels=True) is None
    rows = np.stack([np.zeros(BINS), np.ones(BINS)])
    found = promises.received({SURVIVALS: rows}, labels=True)
    assert found is not None and found.sum() == BINS
    assert promises.received({SURVIVALS: rows}, labels=False) is None  # nothing in it
    for bad in (rows[:, 1:], -rows, rows * np.nan):
        with pytest.raises(ArtefactError, match="extra survivals"):
            promises.received({SURVIVALS: bad}, labels=True)


def test_levels_reach_from_hardly_any_to_more_than_half_of_the_samples() -> None:
    assert LEVELS[0] <= 0.001 and LEVELS[-1] >= 0.5 and len(LEVELS) == 64


def first_alarm(outside: np.ndarray, a: float = 0.1) -> int:
    """The number of labels after which the alarm comes; more than there are without one."""
    for n in range(1, len(outside) + 1):
        if promises.alarm((bool(each), a) for each in outside[:n]) >= 1:
            return n
    return len(outside) + 1


@pytest.mark.parametrize("before", [0, 60])
def test_an_alarm_comes_within_60_labels_after_a_drop_of_ten_points(before: int) -> None:
    rng = np.random.default_rng(before)
    delays = []
    for _ in range(60):
        drawn = rng.random(before + 200)
        found = first_alarm(drawn < np.where(np.arange(len(drawn)) < before, 0.1, 0.2))
        if found > before:
            delays.append(found - before)
    assert len(delays) > 50 and np.median(delays) <= 62


def test_alarms_without_drift_are_as_rare_as_stated() -> None:
    """Of 10,000 device-years with 100 later labels each, at most 100 / LABELS_PER_ALARM have one."""
    years, labels, a = 10_000, 100, 0.1
    rng, total, alarmed = (
        np.random.default_rng(1),
        np.zeros((years, len(promises.BETS))),
        np.zeros(years, bool),
    )
    outside = rng.random((labels, years)) < a
    for missed in outside:  # as `alarm`, of all at once
        bets = np.minimum(np.array(promises.BETS) / (a * (1 - a)), promises.LARGEST / a)
        total = (1 + total) * (1 + bets * (missed[:, None] - a))
        alarmed |= total.mean(axis=1) >= promises.LABELS_PER_ALARM
    assert 0.02 < alarmed.mean() <= labels / promises.LABELS_PER_ALARM
    one = promises.alarm((bool(each), a) for each in outside[:, 0])
    assert np.isclose(one, total[0].mean() / promises.LABELS_PER_ALARM)


@pytest.mark.parametrize("promise", [0.5, 0.8, 0.95, 0.99])
def test_an_alarm_goes_down_with_labels_inside_their_sets_whatever_the_promise(promise: float) -> None:
    broken = [(True, 1 - promise)] * 40
    assert promises.alarm(broken) > 1 > promises.alarm([*broken, *[(False, 1 - promise)] * 20_000]) > 0


def test_a_sum_can_neither_reduce_all_sets_to_one_class_nor_fill_them() -> None:
    """Whatever a hostile device adds, its fleet's quantiles stay within a factor of three of right probabilities."""
    honest = np.stack([promises.histogram(np.random.default_rng(1).random(5000))] * 2)
    assert np.allclose(promises.limited(honest), honest)
    sure, unsure = (np.tile(np.eye(BINS)[place] * 5000, (2, 1)) for place in (0, BINS - 1))
    logits, y = device(3000, 5)
    for rows, least, most in ((sure, 0.4, 0.9), (unsure, 0.99, 1.0)):
        bounded = promises.limited(rows)
        assert np.allclose(bounded.sum(axis=1), rows.sum(axis=1)) and (bounded >= 0).all()
        for fleet, wild in ((bounded[1], False), (rows[1], True)):
            found = promises.of(NO_SAMPLES, NO_LABELS, np.empty(0), logits, fleet=fleet).sets(logits, 0.8)
            covered, size = found[np.arange(len(y)), y].mean(), found.sum(axis=1).mean()
            assert wild or (least < covered <= most and size < C - 0.5)
            assert not wild or size in (1.0, C)


def test_a_devices_histograms_for_its_fleet_count_each_scene_once() -> None:
    logits, y = device(50, 6)
    rows = promises.for_fleet(logits, logits, y, np.full(50, 0.1))
    assert rows.shape == (2, BINS) and np.allclose(rows.sum(axis=1), 1) and np.array_equal(rows[0], rows[1])
