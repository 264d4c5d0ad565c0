"""The served head: the fleet's head without labels, a little of the device with few, the device's own with many, and never a jump."""

import logging
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from edge_fl import heads
from edge_fl.errors import ArtefactError, DataError
from edge_fl.heads import HeadPlan, served
from edge_fl.heads.head import Array, Extras
from tests.edge_fl.heads.digits import (
    BIAS,
    CLASSES,
    NONE,
    OWN,
    PLAN,
    UNSEEN,
    WEIGHT,
    Labels,
    Y,
    Z,
    accuracy,
    device,
    fit,
    given,
    own,
)

PERMUTED: Extras = {"head": {"weight": np.roll(WEIGHT, 1, axis=0), "bias": np.roll(BIAS, 1)}}
SHARES = [0.19, 0.01, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
DEVICES = range(5)


def of_fleet(shares: Array) -> Array:
    """Logits of the fleet's head on all samples, with class shares of a device in the place of equal ones."""
    return Z @ WEIGHT.T + BIAS + np.log(np.asarray(shares) * CLASSES)


def test_without_labels_it_is_the_fleets_head() -> None:
    head = fit(NONE)
    assert head.logits(Z) == pytest.approx(Z @ WEIGHT.T + BIAS, abs=1e-3)
    assert served.fit(given(NONE)).own_weight == 0 and accuracy(head) > 90


def test_with_a_single_label_it_is_nearly_the_fleets_head_with_own_class_shares() -> None:
    for seed in DEVICES:
        rows = device(seed, total=1)
        estimate = served.fit(given(rows))
        expected = of_fleet(estimate.shares).argmax(axis=1)
        assert (estimate.head.predict(Z) == expected).mean() > 0.98
        assert abs(accuracy(estimate.head) - accuracy(fit(NONE))) < 3


def test_class_shares_are_those_of_the_labels_with_some_of_the_fleets() -> None:
    rows, fleets = device(0, total=7), np.array(SHARES)
    counts = np.bincount(Y[rows], minlength=CLASSES)
    expected = (counts + served.PSEUDO_COUNT * CLASSES * fleets) / (7 + served.PSEUDO_COUNT * CLASSES)
    data = given(rows, plan=HeadPlan(fleet="head", shares=SHARES))
    assert served.fit(data).shares == pytest.approx(expected)
    assert served.fit(given(rows)).shares == pytest.approx(
        (counts + served.PSEUDO_COUNT) / (7 + 10 * served.PSEUDO_COUNT)
    )


def test_balanced_has_equal_class_shares_whatever_the_labels_and_the_fleets() -> None:
    plan = HeadPlan(fleet="head", shares=SHARES)
    rows = np.concatenate([device(0, 12, np.array([3])), device(0, 1, np.array([8]))])
    assert served.fit(given(rows, plan=plan, balanced=True)).shares == pytest.approx([0.1] * CLASSES)
    logits = heads.fitted("logistic", given(NONE, plan=plan, balanced=True)).logits(Z)
    expected = Z @ WEIGHT.T + BIAS - np.log(np.array(SHARES) * CLASSES)
    assert logits == pytest.approx(expected, abs=1e-3)


def test_a_closed_set_has_only_classes_with_labels_and_an_open_one_all() -> None:
    rows = device(0, 3, np.array([2, 5]))
    closed, open_ = fit(rows, closed=True).logits(Z), fit(rows).logits(Z)
    assert np.isfinite(closed).all(axis=0).nonzero()[0].tolist() == [2, 5]
    assert np.isfinite(open_).all()


def test_appended_classes_wait_for_labels() -> None:
    assert np.isneginf(fit(NONE, classes=12).logits(Z)[:, 10:]).all()
    rows = device(0, 8)
    y = np.where(Y == 4, 11, Y)  # the device names what the fleet calls 4
    head = fit(rows, y=y[rows], classes=12)
    assert np.isneginf(head.logits(Z)[:, 10]).all()
    assert (head.predict(Z[UNSEEN]) == y[UNSEEN])[y[UNSEEN] == 11].mean() > 0.5
    assert accuracy(head, y) > accuracy(own(rows, y=y[rows], classes=12), y) - 1


def test_a_class_that_only_this_device_has_is_learned_and_the_others_stay() -> None:
    extras = {"head": {"weight": WEIGHT * (np.arange(CLASSES) != 9)[:, None], "bias": BIAS.copy()}}
    extras["head"]["bias"][9] = BIAS.min()
    plan = HeadPlan(fleet="head", shares=[1 / 9] * 9 + [0.0])
    before, rows = fit(NONE, extras, plan), device(0, 8)
    one = fit(np.concatenate([rows[Y[rows] < 9], rows[Y[rows] == 9][:1]]), extras, plan)
    after, only = fit(rows, extras, plan), own(rows)
    nines = UNSEEN.start + np.flatnonzero(Y[UNSEEN] == 9)
    others = UNSEEN.start + np.flatnonzero(Y[UNSEEN] != 9)
    assert accuracy(before, rows=nines) == 0 < 75 < accuracy(after, rows=nines)
    assert accuracy(one, rows=nines) > 5
    assert accuracy(after, rows=others) > accuracy(only, rows=others) - 1


def test_a_head_that_contradicts_the_labels_loses_its_weight() -> None:
    found = [
        (accuracy(fit(rows, PERMUTED)), accuracy(own(rows))) for rows in (device(n, 10) for n in DEVICES)
    ]
    with_it, alone = np.mean(found, axis=0)
    assert accuracy(fit(NONE, PERMUTED)) < 10 and with_it > alone - 1
    assert (
        served.fit(given(device(0, 10), PERMUTED)).own_weight
        > 0.9
        > 0.1
        > served.fit(given(device(0, 10))).own_weight
    )


@pytest.mark.parametrize("labels", [3, 10])
def test_a_class_with_another_name_is_learned_as_the_device_names_it(labels: int) -> None:
    y = np.where(Y == 3, 8, Y)
    found = [
        (accuracy(fit(rows, y=y[rows]), y), accuracy(own(rows, y=y[rows]), y), accuracy(fit(NONE), y))
        for rows in (device(n, labels) for n in DEVICES)
    ]
    with_it, alone, fleets = np.mean(found, axis=0)
    assert with_it > max(alone, fleets) - 1


UNFIT: dict[str, dict[str, Array]] = {
    "of another width": {"weight": WEIGHT[:, 1:], "bias": BIAS},
    "of more classes": {"weight": np.vstack([WEIGHT, WEIGHT]), "bias": np.append(BIAS, BIAS)},
    "not finite": {"weight": WEIGHT * np.nan, "bias": BIAS},
    "without weights": {"bias": BIAS},
}


@pytest.mark.parametrize("flaw", UNFIT)
def test_a_head_that_does_not_fit_is_left_out_and_said(flaw: str, caplog: pytest.LogCaptureFixture) -> None:
    rows, extras = device(0, 5), {"head": UNFIT[flaw]}
    with caplog.at_level(logging.WARNING):
        head = fit(rows, extras)
    assert "fleet's head 'head'" in caplog.text and "own labels alone" in caplog.text
    assert accuracy(head) > accuracy(own(rows)) - 2
    with pytest.raises(ArtefactError, match=r"fleet's head 'head'.*expected"):
        fit(NONE, extras)


def test_without_a_fleets_head_no_labels_are_an_error() -> None:
    with pytest.raises(DataError):
        own(NONE)


def test_with_many_labels_it_is_as_good_as_the_own_head() -> None:
    rows = np.arange(OWN)
    assert accuracy(fit(rows)) > accuracy(own(rows)) - 0.5
    assert accuracy(fit(rows[:300], PERMUTED)) > accuracy(own(rows[:300])) - 0.5


def test_it_is_at_least_the_better_one_on_average() -> None:
    for labels in (3, 10, 40):
        found = [
            (accuracy(fit(rows)), accuracy(own(rows)), accuracy(fit(NONE)))
            for rows in (device(n, total=labels) for n in DEVICES)
        ]
        with_it, alone, fleets = np.mean(found, axis=0)
        assert with_it > max(alone, fleets) - 2


def test_one_more_label_never_changes_much() -> None:
    order = device(1, total=25)
    found = [accuracy(fit(order[:count])) for count in range(len(order) + 1)]
    assert np.abs(np.diff(found)).max() < 4
    assert min(found) > found[0] - 4


def test_frames_of_one_scene_count_once() -> None:
    rows = device(0, 6)
    rows = rows[np.argsort(fit(NONE).predict(Z[rows]) == Y[rows], kind="stable")]
    assert fit(NONE).predict(Z[rows[:1]]) != Y[rows[0]]  # the burst shows what the fleet does not know
    frames, scenes = np.append(rows, np.repeat(rows[0], 29)), np.append(np.arange(len(rows)), np.zeros(29))
    once, burst = served.fit(given(rows)), served.fit(given(frames, groups=scenes.astype(np.int64)))
    apart = served.fit(given(frames))
    assert burst.shares == pytest.approx(once.shares) and burst.own_weight == pytest.approx(
        once.own_weight, abs=0.02
    )
    assert burst.head.logits(Z) == pytest.approx(once.head.logits(Z), abs=0.05)
    assert np.abs(apart.head.logits(Z) - once.head.logits(Z)).max() > 1
    assert sorted(np.concatenate(burst.folds)) == list(range(len(frames)))
    of_first = [fold for fold in burst.folds if (burst.rows[fold] < 30).any() and len(fold) >= 30]
    assert len(of_first) == 1  # the burst is in one fold


def test_the_order_of_the_samples_does_not_matter() -> None:
    rows = device(0, 4)
    scenes = np.arange(len(rows)) // 2
    turned = np.random.default_rng(1).permutation(len(rows))
    one, other = given(rows, groups=scenes), given(rows[turned], groups=scenes[turned])
    assert np.array_equal(served.fit(one).head.logits(Z), served.fit(other).head.logits(Z))
    assert np.array_equal(served.fit(one).logits, served.fit(other).logits)


def log_loss(logits: Array, y: Labels) -> float:
    logits = logits - logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]))


@pytest.mark.parametrize("strength", [10.0, 1.0])
def test_predictions_without_a_fold_are_those_of_a_head_that_is_fitted_without_it(
    strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "STRENGTHS", (strength,))
    monkeypatch.setattr(served, "OWN_PRIOR", -1e9)
    rows = device(2, 5)
    data = given(rows, balanced=True)  # no class shares, which differ without a fold
    estimate = served.fit(data)
    expected, resubstituted = np.empty_like(estimate.logits), served.fit(data).head.logits(data.z)
    for fold in estimate.folds:
        rest = np.setdiff1d(np.arange(len(rows)), fold)
        without = replace(data, z=data.z[rest], y=data.y[rest])
        expected[fold] = served.fit(without).head.logits(data.z[fold])
    found, true = log_loss(estimate.logits, data.y), log_loss(expected, data.y)
    assert abs(found - true) < 0.3 * (true - log_loss(resubstituted, data.y))


def test_each_fold_has_one_sample_of_each_class() -> None:
    estimate = served.fit(given(rows := device(0, 4)))
    y = given(rows).y
    assert [sorted(y[estimate.rows[fold]]) for fold in estimate.folds] == [list(range(CLASSES))] * 4


def test_wide_features_take_seconds_and_little_memory() -> None:
    rng, y = np.random.default_rng(0), np.arange(2000) % CLASSES
    centres = rng.normal(size=(CLASSES, 1280))
    z = (centres[y] + 3 * rng.normal(size=(2000, 1280))).astype(np.float32)
    weight = (centres / 10).astype(np.float32)
    extras = {"head": {"weight": weight, "bias": np.zeros(CLASSES, np.float32)}}
    data = heads.training_set(z, y, CLASSES, False, plan=PLAN, extras=extras)
    tracemalloc.start()
    started_s = time.process_time()  # of the processor: tests run side by side
    estimate = served.fit(data)
    seconds, (_, most) = time.process_time() - started_s, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 10 and most < 500e6
    assert (estimate.head.predict(z) == y).mean() > 0.95


@pytest.mark.parametrize("labels", [0, 3])
def test_unlabelled_samples_show_the_class_shares_of_a_device(labels: int) -> None:
    """Overlapping classes, for which the fleet's head is the best possible one while they are equally frequent."""
    centres = 0.8 * np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    extras = {"head": {"weight": centres, "bias": -np.square(centres).sum(axis=1) / 2}}
    gains, shares = [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        true = rng.dirichlet([0.5] * 5)
        y = rng.choice(5, 500, p=true)
        z = (centres[y] + rng.normal(size=(500, 6))).astype(np.float32)
        settings = {"plan": PLAN, "extras": extras}
        data = heads.training_set(z[:labels], y[:labels], 5, False, **settings)  # type: ignore[arg-type]
        with_pool, without = served.fit(replace(data, unlabelled=z[labels:100])), served.fit(data)
        right = [(each.head.predict(z[100:]) == y[100:]).mean() for each in (with_pool, without)]
        gains.append(100 * (right[0] - right[1]))
        shares.append(np.abs(np.array([with_pool.shares, without.shares]) - true).sum(axis=1))
    assert np.mean(gains) > 2 and min(gains) > -3
    off, off_without = np.mean(shares, axis=0)
    assert off < 0.7 * off_without


def test_what_is_predicted_of_a_sample_without_it_knows_the_unlabelled_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "STRENGTHS", (np.inf,))
    monkeypatch.setattr(served, "OWN_PRIOR", -1e9)
    rows, pool = device(0, total=20), np.flatnonzero(Y[OWN:] == 3)[:40] + OWN
    data = given(rows, unlabelled=Z[pool])
    found = served.fit(data)
    count = len(rows) + CLASSES * served.PSEUDO_COUNT + len(pool) * served.UNLABELLED_COUNT
    without_half = found.shares * count - 0.5 * np.eye(CLASSES)[data.y]
    offsets = np.log(without_half / without_half.sum(axis=1, keepdims=True) * CLASSES)
    assert found.fleet is not None
    assert found.logits - found.fleet == pytest.approx(offsets, abs=1e-6)


@pytest.mark.parametrize("unlabelled", [0, 1])
@pytest.mark.parametrize("labels", [0, 1, 20])
def test_a_pool_of_one_sample_or_none_changes_little(unlabelled: int, labels: int) -> None:
    rows = device(0, total=labels) if labels else NONE
    head = fit(rows, unlabelled=Z[OWN : OWN + unlabelled])
    assert abs(accuracy(head) - accuracy(fit(rows))) < 1
    assert unlabelled or np.array_equal(head.logits(Z), fit(rows).logits(Z))


@pytest.mark.parametrize("labels", [0, 20])
def test_it_survives_bytes_bit_for_bit(labels: int) -> None:
    head = fit(device(0, total=labels) if labels else NONE, extractor="ab" * 32)
    again = heads.from_arrays(head.to_arrays(), head.describe())
    assert again.kind == "fleet" and again.extractor == "ab" * 32
    assert np.array_equal(again.logits(Z), head.logits(Z))


def test_samples_of_more_than_are_weighed_are_as_many_of_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MOST_NARROW", 50)
    data = given(np.arange(OWN))
    estimate = served.fit(data)
    assert np.bincount(data.y[estimate.rows]).tolist() == [5] * CLASSES
    assert len(estimate.logits) == 50 and accuracy(estimate.head) > 93


def test_the_plan_decides_whether_the_fleets_head_is_used() -> None:
    rows = device(0, 3)
    way = fit(rows, plan=HeadPlan(fleet="head", serves="way"))
    assert way.kind == "logistic" and np.array_equal(way.logits(Z), own(rows).logits(Z))
    assert fit(rows).kind == "fleet"
    assert heads.fitted("nearest", given(rows)).kind == "nearest"


def test_with_fewer_labels_than_features_least_squares_see_through_what_classes_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Features that vary in a few directions, whatever the class, as those of many kernels on one series do."""
    classes, dim = 7, 1000
    rng = np.random.default_rng(0)
    means, shared = 6 * rng.normal(size=(classes, dim)) / dim**0.5, rng.normal(size=(50, dim)) / 50**0.5
    own, tests = np.repeat(np.arange(classes), 10), np.repeat(np.arange(classes), 50)
    z, unseen = (
        (means[y] + rng.normal(size=(len(y), 50)) @ shared + 0.1 * rng.normal(size=(len(y), dim))).astype(
            np.float32
        )
        for y in (own, tests)
    )

    def found() -> float:
        data = heads.training_set(z, own, classes, False, "", 0, False, HeadPlan(), {})
        return float((served.fit(data).head.predict(unseen) == tests).mean())

    assert found() > 0.95
    monkeypatch.setattr(served, "SQUARED_STRENGTHS", ())
    assert found() < 0.8


@pytest.mark.parametrize("kind", ["logistic", "svm", "mlp"])
def test_a_feature_that_hardly_varies_among_the_labels_does_not_decide(kind: str) -> None:
    """It does vary in samples to come, and would be huge if it were divided by its spread among the labels."""
    rows, noise = device(0, 10), np.random.default_rng(0).normal(size=(len(Z), 20)).astype(np.float32)
    noise *= 0.2 * Z.std()
    noise[rows] *= 1e-3
    found = [
        float(
            (
                heads.fit(kind, z[rows], Y[rows], CLASSES, unit_norm=False).predict(z[UNSEEN]) == Y[UNSEEN]
            ).mean()
        )
        for z in (Z, np.hstack([Z, noise]))
    ]
    assert found[1] > found[0] - 0.1, found
