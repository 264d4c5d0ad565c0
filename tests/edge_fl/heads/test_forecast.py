"""The forecast: the curve through the fleet's head and the own one, its interval, and when labels are enough."""

import numpy as np
import pytest
from scipy.stats import beta

from edge_fl import metrics
from edge_fl.heads import forecast
from edge_fl.heads.forecast import ALONE, LEAST_GAIN, MORE, USUAL
from edge_fl.heads.wording import MeasuredAccuracy

MANY = 1e6
"""Scenes of which an accuracy is as good as known."""


def test_an_error_that_falls_as_a_power_goes_on_so() -> None:
    errors = [0.4 * ((n + USUAL.start) / USUAL.start) ** -0.3 for n in (0, 30, 30 + MORE)]
    found = forecast.of(1 - errors[1], 1 - errors[0], 30, MANY)
    assert found.gain == pytest.approx(errors[1] - errors[2], abs=1e-4)
    assert found.low < 1 - errors[2] < found.high and found.high - found.low < 0.01


def test_few_labels_say_little_about_the_curve_and_a_head_that_became_worse_gains_nothing() -> None:
    usual = forecast.of(0.7, 0.7, 10, 1e-3).gain / (1 / 2)  # the mean of an error of which nothing is known
    assert usual == pytest.approx(
        1 - ((10 + MORE + USUAL.start) / (10 + USUAL.start)) ** -USUAL.rate, abs=1e-3
    )
    steep, flat = forecast.of(0.8, 0.4, 30, 30), forecast.of(0.8, 0.75, 30, 30)
    assert steep.gain > 1.5 * flat.gain > 0
    worse = forecast.of(0.6, 0.8, 30, MANY)
    assert worse.gain == 0 and worse.low < 0.6 < worse.high


@pytest.mark.parametrize(("accuracy", "scenes"), [(1.0, 12), (0.9, 60), (0.5, 30), (0.0, 8)])
def test_its_interval_is_the_shortest_with_four_fifths_of_the_posterior(accuracy: float, scenes: int) -> None:
    found = forecast.of(accuracy, accuracy, scenes, scenes, more=0)
    posterior = beta(scenes * accuracy + 1, scenes * (1 - accuracy) + 1)
    assert posterior.cdf(found.high) - posterior.cdf(found.low) == pytest.approx(0.8, abs=0.005)
    ends = [posterior.pdf(end) for end in (found.low, found.high) if 0 < end < 1]
    inside = posterior.pdf(np.linspace(found.low, found.high, 50)[1:-1])
    assert max(ends) <= 1.05 * inside.min()
    assert (found.high == 1) == (accuracy == 1) and (found.low == 0) == (accuracy == 0)


def test_it_says_what_is_expected_or_that_there_are_enough_labels() -> None:
    found = {
        metrics.PERSONAL_AFTER: 0.8,
        metrics.FLEET: 0.6,
        metrics.TEST_SAMPLES: 30.0,
        metrics.TEST_EFFECTIVE: 20.0,
    }
    said = MeasuredAccuracy.of_report(found).forecast
    assert said and not said.is_enough
    assert (
        said.words
        == "20 more labels: 70 to 91 % on new scenes (80 % interval, from 30) instead of 80.0 %, +2.5 points expected"
    )
    said = MeasuredAccuracy.of_report(
        found | {metrics.TEST_SAMPLES: 150.0, metrics.TEST_EFFECTIVE: 100.0}
    ).forecast
    assert said and said.is_enough and said.gain < LEAST_GAIN
    assert said.words.startswith("enough: 20 more labels are expected to add less than 1 point: 7")
    sure = forecast.of(1.0, 1.0, 8, 8)
    assert not sure.is_enough, "eight right predictions are no proof"


@pytest.mark.parametrize(
    "missing",
    [
        {metrics.TEST_SAMPLES: 7.0},
        {metrics.PERSONAL_AFTER: None},
        {metrics.VALIDATION_SAMPLES: 30.0},
        {metrics.TEST_EFFECTIVE: None},  # of a full device, on its test images
        {metrics.TEST_SAMPLES: 0.0},
    ],
)
def test_without_cross_validation_there_is_none(missing: dict[str, float | None]) -> None:
    usual = {metrics.PERSONAL_AFTER: 0.8, metrics.TEST_SAMPLES: 30.0, metrics.TEST_EFFECTIVE: 20.0}
    assert MeasuredAccuracy.of_report(usual).forecast
    report = {name: value for name, value in (usual | missing).items() if value is not None}
    assert MeasuredAccuracy.of_report(report).forecast is None


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.8])
def test_without_a_fleets_head_the_error_falls_as_a_power_from_all_wrong(rate: float) -> None:
    now, later = (1 - (n + ALONE.start) ** -rate for n in (30, 30 + MORE))
    found = forecast.of(now, None, 30, MANY)
    assert found.gain == pytest.approx(later - now, abs=1e-4)
    few, fleet = forecast.of(0.8, None, 30, 20), forecast.of(0.8, 0.0, 30, 20, curve=USUAL)
    assert few.high - few.low > 1.1 * (fleet.high - fleet.low)
