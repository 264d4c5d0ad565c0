"""The fleet's head of a release: what its extras mean, what does not fit, and a discriminant that knows what the samples know."""

import numpy as np
import pytest

from edge_fl import heads
from edge_fl.errors import ArtefactError
from edge_fl.heads import HeadPlan, fleet
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.fleet import Fleet, FleetCosine
from edge_fl.heads.head import Array
from edge_fl.heads.linear import direction
from tests.edge_fl.heads.digits import (
    BIAS,
    CLASSES,
    EXTRAS,
    NONE,
    OWN,
    PLAN,
    UNSEEN,
    WEIGHT,
    Y,
    Z,
    accuracy,
    device,
    fit,
    given,
)

MEANS = np.stack([Z[:OWN][Y[:OWN] == label].mean(axis=0) for label in range(CLASSES)])


def statistics() -> dict[str, dict[str, Array]]:
    """The extra with the class statistics of five devices."""
    found = [sums.of(Z[part], Y[part], CLASSES) for part in np.split(np.arange(OWN), 5)]
    return {PRIOR: sums.from_flat(np.sum([each.flat for each in found], axis=0), found[0].shape).arrays()}


STATISTICS = HeadPlan("cosine", fleet=PRIOR)


def test_a_release_without_one_has_none() -> None:
    assert fleet.received(given(device(0, 1), {}, HeadPlan())) is None


def test_a_linear_head_is_taken_as_it_is() -> None:
    found = fleet.received(given(NONE))
    assert found is not None and found.known.all() and not found.directed
    assert found.logits(Z) == pytest.approx(Z @ WEIGHT.T + BIAS, abs=1e-4)
    assert found.shares == pytest.approx([0.1] * CLASSES)


def test_factors_on_logits_count() -> None:
    extras = {**EXTRAS, fleet.SCALE: {"s": np.float32(3.0)}}
    found = fleet.received(given(NONE, extras, HeadPlan(fleet="head", times=2.0)))
    assert found is not None
    assert found.logits(Z) == pytest.approx(6 * (Z @ WEIGHT.T + BIAS), rel=1e-5, abs=1e-4)


def test_a_computed_head_has_the_spread_of_features_and_the_factor_on_its_logits() -> None:
    spread, plan = np.linspace(0.5, 2, Z.shape[1], dtype=np.float32), HeadPlan(fleet="head")
    extras = {"head": {**EXTRAS["head"], "spread": spread, "factor": np.array([0.25], np.float32)}}
    found = fleet.received(given(NONE, extras, plan))
    assert found is not None and found.factor == 0.25 and found.spread == pytest.approx(spread)
    assert found.logits(Z) == pytest.approx(Z @ WEIGHT.T + BIAS, abs=1e-4)
    wrong = (
        {"spread": spread[1:]},
        {"factor": np.zeros(1)},
        {"factor": np.full(1, np.nan)},
        {"spread": spread + np.inf},
    )
    for each in wrong:
        with pytest.raises(ArtefactError, match=r"spread .* factor up to 1"):
            fleet.received(given(NONE, {"head": {**extras["head"], **each}}, plan))


def test_prototypes_are_the_nearest_class_mean() -> None:
    extras = {"prototypes": {"mean": MEANS, "count": np.ones(CLASSES, np.float32)}}
    head = fit(NONE, extras, HeadPlan(fleet="prototypes"))
    nearest = np.square(Z[:, None] - MEANS).sum(axis=2).argmin(axis=1)
    assert np.array_equal(head.predict(Z), nearest)


def test_a_class_without_samples_in_the_fleet_is_unknown() -> None:
    shares = [1 / 9] * 9 + [0.0]
    found = fleet.received(given(NONE, plan=HeadPlan(fleet="head", shares=shares)))
    assert found is not None and found.known.tolist() == [True] * 9 + [False]
    assert (found.shares > 0).all() and found.shares.sum() == pytest.approx(1)
    assert np.isneginf(fit(NONE, plan=HeadPlan(fleet="head", shares=shares)).logits(Z)[:, 9]).all()


def test_appended_classes_are_unknown() -> None:
    found = fleet.received(given(NONE, classes=13))
    assert found is not None and found.known.tolist() == [True] * 10 + [False] * 3
    assert found.weights.shape == (13, Z.shape[1]) and len(found.shares) == len(found.bias) == 13


@pytest.mark.parametrize(
    ("arrays", "shares"),
    [
        ({}, []),
        ({"bias": BIAS}, []),
        ({"weight": WEIGHT[:, 1:], "bias": BIAS}, []),
        ({"weight": WEIGHT, "bias": BIAS[1:]}, []),
        ({"weight": np.vstack([WEIGHT, WEIGHT])}, []),
        ({"weight": WEIGHT * np.inf, "bias": BIAS}, []),
        ({"weight": WEIGHT, "bias": BIAS}, [0.5, 0.5]),
    ],
)
def test_an_extra_that_does_not_fit_says_what_came_and_what_was_expected(
    arrays: dict[str, Array], shares: list[float]
) -> None:
    with pytest.raises(ArtefactError, match=r"fleet's head 'head': .*, expected ") as raised:
        fleet.received(given(NONE, {"head": arrays}, HeadPlan(fleet="head", shares=shares)))
    assert raised.value.consequence == "no head was fitted"


def test_class_statistics_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ArtefactError, match="fleet's head 'prior'"):
        fleet.received(given(NONE, {PRIOR: {"sums": MEANS}}, STATISTICS))


def test_class_statistics_are_a_head_on_directions_that_needs_no_labels() -> None:
    head = fit(NONE, statistics(), STATISTICS)
    assert isinstance(head, FleetCosine) and accuracy(head) > 88
    assert np.array_equal(head.predict(Z), head.predict(7 * Z))
    with_labels = [accuracy(fit(device(seed, 3), statistics(), STATISTICS)) for seed in range(4)]
    assert np.mean(with_labels) > accuracy(head) - 2


def test_the_discriminant_is_the_best_head_of_normal_classes() -> None:
    rng, dim = np.random.default_rng(0), 12
    mixing = 0.1 * rng.normal(size=(dim, dim)) + np.eye(dim)
    means = rng.normal(size=(CLASSES, dim))
    y = np.arange(8000) % CLASSES
    z = means[y] + rng.normal(size=(8000, dim)) @ mixing.T
    covariance = mixing @ mixing.T
    exact = np.linalg.solve(covariance, means.T).T
    weights, bias = fleet.discriminant(means, covariance)
    predicted = [z @ w.T + b for w, b in ((weights, bias), (exact, -0.5 * (exact * means).sum(axis=1)))]
    found, best = [(logits.argmax(axis=1) == y).mean() for logits in predicted]
    assert best > 0.6 and found > best - 0.03


def test_an_adapted_head_is_restored_over_all_classes() -> None:
    rows = device(0, 3, np.array([1, 6]))
    for extras, plan in ((EXTRAS, PLAN), (statistics(), STATISTICS)):
        head = fit(rows, extras, plan, closed=True)
        assert isinstance(head, Fleet | FleetCosine) and head.present.tolist() == [1, 6]
        weights, bias = head.over_all()
        u = direction(Z) if head.directed else Z
        expected = head.logits(Z)[:, [1, 6]]
        assert (u @ weights.T + bias)[:, [1, 6]] == pytest.approx(expected, abs=1e-4)
        assert np.isneginf(bias[[0, 2, 3, 4, 5, 7, 8, 9]]).all()
        again = heads.from_arrays(head.to_arrays(), head.describe())
        assert type(again) is type(head) and np.array_equal(again.logits(Z[UNSEEN]), head.logits(Z[UNSEEN]))
