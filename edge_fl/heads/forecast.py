"""How accurate a head is expected to be with more labels, from what is measured on those so far.

The error falls as a power of the number of labels n, from that of the fleet's head, which counts as `start` labels:

    error(n) = error of the fleet's head · ((n + start) / start)^-r

A device's own r follows from the errors of its head and of the fleet's on the same samples, both counted together with those of
`errors` errors of the fleet's head at the usual r (`rate`): few labels leave it near the usual one. So

    error(n + m) = error(n) · ((n + m + start) / (n + start))^-r

Without a fleet's head the error without labels is 1.

The interval is the shortest one that holds 80 % of the posterior Beta(N e + 1, N (1 - e) + 1) of an error e that was measured on N
independent samples, with a uniform prior. N is the number of scenes over `Curve.variance`. The gain is that of the mean of the
posterior of the error now, so that it is not 0 where no error was seen yet.

Sources: power laws of learning curves, C. Cortes et al., "Learning curves", 1993; T. Viering and M. Loog, "The shape of learning curves",
2022. What it is worth: `python -m tools.study.forecasts`, docs/teach-a-device.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edge_fl.console.units import percent, points
from edge_fl.heads.probability_calibration import CORRELATED

MORE = 20
"""Labels ahead that are forecast."""
MASS = 0.8
"""Probability of the interval."""
LEAST_GAIN = 0.01
"""Expected gain below which there are enough labels."""
CELLS = 2000
"""Parts of 0..1 on which the posterior is evaluated."""


class Curve(NamedTuple):
    """Constants of the learning curve, see the module; variance: of the forecast, over that of an accuracy on independent samples."""

    start: float = 0.3
    rate: float = 0.4
    errors: float = 10.0
    variance: float = CORRELATED


USUAL = Curve()
ALONE = Curve(1.0, 0.5, 1.0, 2.25)
"""With and without a fleet's head, fitted on PACS, CIFAR-10 and exercises (`python -m tools.study.forecasts`)."""


class Forecast(NamedTuple):
    """What `more` labels are expected to add to the accuracy `now`, which was measured on `scenes`.

    low, high: the 80 % interval of the accuracy with them. Accuracies and gain are 0..1.
    """

    more: int
    scenes: int
    now: float
    gain: float
    low: float
    high: float

    @property
    def is_enough(self) -> bool:
        """Whether more labels are expected to add little."""
        return self.gain < LEAST_GAIN

    @property
    def words(self) -> str:
        """Like "20 more labels: 81 to 92 % on new scenes (80 % interval, from 60) instead of 84.0 %, +2.1 points expected"."""
        reach = f"{100 * self.low:.0f} to {100 * self.high:.0f} % on new scenes (80 % interval, from {self.scenes:,})"
        if self.is_enough:
            return f"enough: {self.more} more labels are expected to add less than 1 point: {reach}"
        return (
            f"{self.more} more labels: {reach} instead of {percent(self.now)}, {points(self.gain)} expected"
        )


def of(
    accuracy: float,
    fleet: float | None,
    labels: int,
    independent: float,
    more: int = MORE,
    curve: Curve | None = None,
) -> Forecast:
    """The forecast for a head with this cross-validated accuracy on `labels` scenes.

    fleet: the accuracy of the fleet's head on the same ones, None without one. independent: how many independent scenes would be as certain
    (`Calibration.independent`). curve: by default USUAL, or ALONE without a fleet's head.
    """
    curve = curve or (ALONE if fleet is None else USUAL)
    error, of_fleet = 1 - accuracy, 1 - (fleet or 0.0)
    grown = (labels + curve.start) / curve.start
    usual = curve.errors * grown**-curve.rate
    effective = CORRELATED * independent
    falls = (effective * error + usual) / (effective * of_fleet + curve.errors)
    rate = max(-np.log(falls) / np.log(grown), 0.0)
    remains = float(((labels + more + curve.start) / (labels + curve.start)) ** -rate)
    count = effective / curve.variance
    mean = (count * error + 1) / (count + 2)
    low, high = _shortest(error * remains, count)
    return Forecast(more, labels, accuracy, mean * (1 - remains), 1 - high, 1 - low)


def _shortest(share: float, count: float) -> tuple[float, float]:
    """The shortest interval with MASS of the posterior of a share that was measured on `count` samples, with a uniform prior."""
    ends = np.linspace(0, 1, CELLS + 1)
    middle = (ends[1:] + ends[:-1]) / 2
    log_density = count * (share * np.log(middle) + (1 - share) * np.log(1 - middle))
    density = np.exp(log_density - log_density.max())
    order = np.argsort(-density, kind="stable")
    kept = order[: 1 + int(np.searchsorted(np.cumsum(density[order]), MASS * density.sum()))]
    return float(ends[kept.min()]), float(ends[kept.max() + 1])
