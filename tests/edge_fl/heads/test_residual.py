"""Residuals on the served head: nothing with few labels, what a linear head cannot learn with many."""

import numpy as np
import pytest

from edge_fl import heads
from edge_fl.heads import HeadPlan, residual, served
from edge_fl.heads.fleet import Fleet, FleetCosine
from edge_fl.heads.head import Head, TrainingSet
from edge_fl.heads.residual import FleetMlp
from tests.edge_fl.heads.digits import EXTRAS, NONE, PLAN, Z, accuracy, device, given
from tests.edge_fl.heads.test_fleet import STATISTICS, statistics

KINDS = list(residual.KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_without_labels_and_with_those_of_one_class_it_is_the_served_head(kind: str) -> None:
    for rows in (NONE, device(0, 3, np.array([4]))):
        data = given(rows)
        found, expected = heads.fitted(kind, data), served.fit(data).head
        assert found.kind == "fleet" and np.array_equal(found.logits(Z), expected.logits(Z))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [3, 20, 150])
def test_it_is_about_as_good_as_the_served_head(kind: str, total: int) -> None:
    found = []
    for seed in range(3):
        data = given(device(seed, total=total))
        found.append((accuracy(heads.fitted(kind, data)), accuracy(served.fit(data).head)))
    with_it, without = np.mean(found, axis=0)
    assert with_it > without - 1.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [-100.0, 100.0])
def test_a_constant_on_all_logits_of_the_fleets_head_changes_nothing(kind: str, shift: float) -> None:
    shifted = {"head": {"weight": EXTRAS["head"]["weight"], "bias": EXTRAS["head"]["bias"] + shift}}
    rows = device(0, 4, np.array([0, 1, 2]))
    for options in ({}, {"closed": True}):
        found, expected = (heads.fitted(kind, given(rows, extras, **options)) for extras in (shifted, EXTRAS))
        assert np.mean(found.predict(Z) == expected.predict(Z)) > 0.99


def rings(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three classes by their distance from the centre, which no linear head tells apart."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    angle = rng.uniform(0, 2 * np.pi, count)
    length = 1 + y + 0.2 * rng.normal(size=count)
    return np.stack([length * np.cos(angle), length * np.sin(angle)], axis=1).astype(np.float32), y


def test_an_mlp_learns_what_a_linear_head_cannot() -> None:
    z, y = rings(400, 0)
    unseen, true = rings(300, 1)
    extras = {"head": {"weight": np.eye(3, 2, dtype=np.float32), "bias": np.zeros(3, np.float32)}}
    data = heads.training_set(z, y, 3, False, plan=PLAN, extras=extras)
    linear, head = served.fit(data).head, heads.fitted("mlp", data)
    assert isinstance(head, FleetMlp)
    assert (linear.predict(unseen) == true).mean() < 0.6 < 0.9 < (head.predict(unseen) == true).mean()


def test_predictions_without_a_fold_are_honest() -> None:
    """Labels at random: whatever the residual remembers of its samples, the others are not predicted better than by chance."""
    rng = np.random.default_rng(0)
    rows = device(0, 12)
    data = given(rows, y=rng.permutation(np.arange(len(rows)) % 10))
    for kind in KINDS:
        estimate = heads.estimated(kind, data)
        held = estimate.logits.argmax(axis=1) == data.y[estimate.rows]
        assert held.mean() < 0.25


def fitted(kind: str, directed: bool, closed: bool) -> tuple[Head, TrainingSet]:
    plan, extras = (STATISTICS, statistics()) if directed else (PLAN, EXTRAS)
    data = given(device(0, 10, np.array([1, 4, 7])), extras, plan, closed=closed)
    return heads.fitted(kind, data), data


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_survives_bytes_and_keeps_to_its_classes(kind: str, closed: bool, directed: bool) -> None:
    head, data = fitted(kind, directed, closed)
    linear = FleetCosine if directed else Fleet
    assert isinstance(head, FleetMlp if kind == "mlp" else linear)
    again = heads.from_arrays(head.to_arrays(), head.describe())
    assert np.array_equal(again.logits(Z), head.logits(Z))
    assert (head.predict(data.z) == data.y).mean() > 0.95
    if closed:
        assert set(head.predict(Z)) <= {1, 4, 7}


def test_other_kinds_and_the_methods_own_way_have_no_residual() -> None:
    rows = device(0, 5)
    assert heads.fitted("mlp", given(rows, plan=HeadPlan(fleet="head", serves="way"))).kind == "mlp"
    assert heads.fitted("svm", given(rows, {}, HeadPlan())).kind == "svm"
