"""How a device's head and its accuracy are put in words, on the device and on the server: every page, table and command calls these.

An accuracy is shown with the number of scenes it was measured on, with its 90 % interval if these are few, and with that of the
fleet's head on the same ones; below LEAST_MEASURED scenes it is not measured. These are fewer than the labels: pictures that belong
together are one scene, and without a fleet's head a class with a single scene cannot be measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from edge_fl import metrics
from edge_fl.console.units import percent, points
from edge_fl.data import grouping
from edge_fl.heads import fleet, forecast, residual
from edge_fl.heads.forecast import Forecast
from edge_fl.heads.probability_calibration import LEAST_MEASURED, Calibration

NOT_MEASURED = "not measured yet"
COUNTED, TEST_IMAGES = "scenes", "test images"
"""What the accuracy of a head is measured on, and that of a full device."""
NO_SCENE = f"0 of {LEAST_MEASURED} {COUNTED}: a class counts from its second scene on"
NOTHING_YET = "nothing fitted yet"
OWN_MODEL = "own model, trained in runs"
"""What a full device predicts with."""
NOT_PERSONAL = "fleet's head, not personal yet"
WITH_LABELS = "fleet's head with own labels"
OWN = "own head (the fleet's contradicts these labels)"
FROM_FLEET = {*fleet.KINDS, residual.FleetMlp.kind}
"""Kinds of heads that are adapted from the fleet's."""
OWN_ABOVE = 0.5
"""Weight of a device's own labels above which its head is called its own."""
FEW_SCENES = 200
"""Scenes below which the interval is shown."""


class MeasuredAccuracy(NamedTuple):
    """An accuracy on `n` scenes, None if it is not measured; of the fleet's head on the same ones, None without one.

    effective: how many independent scenes would be as certain; fewer in cross-validation (`CORRELATED`). is_reported: the device said
    on how many scenes. counted: what `n` are. of_all_labels: these are the labels that the head was fitted on (cross-validation), and no
    test set.
    """

    accuracy: float | None
    n: int
    fleet: float | None = None
    effective: float = 0.0
    is_reported: bool = False
    counted: str = COUNTED
    of_all_labels: bool = False

    @classmethod
    def of(cls, accuracy: float | None, n: int, fleet: float | None, effective: float | None = None) -> Self:
        """An accuracy that a device reported; below LEAST_MEASURED scenes it is not measured."""
        if accuracy is None or 0 < n < LEAST_MEASURED:
            return cls(None, n)
        return cls(accuracy, n, fleet, float(n) if effective is None else effective)

    @classmethod
    def of_calibration(cls, found: Calibration) -> Self:
        """From the out-of-fold predictions of a head."""
        if not found.is_measured:
            return cls(None, found.scenes, is_reported=True, of_all_labels=True)
        measured = found.accuracy, found.scenes, found.fleet_accuracy, found.independent
        return cls(*measured, is_reported=True, of_all_labels=True)

    @classmethod
    def of_report(cls, found: Mapping[str, float]) -> Self:
        """From the metrics of a device's report."""
        return cls.of(
            found.get(metrics.PERSONAL_AFTER),
            int(found.get(metrics.TEST_SAMPLES, 0)),
            found.get(metrics.FLEET),
            found.get(metrics.TEST_EFFECTIVE),
        )._replace(
            is_reported=metrics.TEST_SAMPLES in found,
            of_all_labels=metrics.TEST_EFFECTIVE in found and not found.get(metrics.VALIDATION_SAMPLES),
        )

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 90 % interval of an accuracy that was measured on few scenes; None if it is not measured, or on many."""
        if self.accuracy is None or math.isnan(self.accuracy) or not 0 < self.n < FEW_SCENES:
            return None
        return grouping.interval(self.accuracy, self.effective or self.n)

    @property
    def range(self) -> str:
        """The interval: "71 to 91 %"; "" without one."""
        ends = self.interval
        return f"{100 * ends[0]:.0f} to {100 * ends[1]:.0f} %" if ends else ""

    @property
    def reach(self) -> str:
        """Like "90 % interval 71 to 91 %"; "" without one."""
        return f"90 % interval {self.range}" if self.range else ""

    @property
    def gain(self) -> str:
        """The fleet's head on the same scenes and the gain over it; "" without one."""
        if self.accuracy is None or self.fleet is None:
            return ""
        return f"fleet's head {percent(self.fleet)} on the same, {points(self.accuracy - self.fleet)}"

    @property
    def forecast(self) -> Forecast | None:
        """What more labels are expected to add; None if the accuracy is not from cross-validation."""
        if self.accuracy is None or math.isnan(self.accuracy + (self.fleet or 0.0)):
            return None
        if not self.of_all_labels or not self.n:
            return None
        return forecast.of(self.accuracy, self.fleet, self.n, self.effective or self.n)

    @property
    def figure(self) -> str:
        """Like "83.0 % of 60 scenes", or why there is none."""
        if self.accuracy is None:
            few = f"{self.n} of {LEAST_MEASURED} {self.counted}" if 0 < self.n < LEAST_MEASURED else ""
            why = few or (NO_SCENE if self.is_reported and not self.n else "")
            return f"{NOT_MEASURED} ({why})" if why else NOT_MEASURED
        return percent(self.accuracy) + (f" of {self.n:,} {self.counted}" if self.n else "")

    @property
    def words(self) -> str:
        """Like "83.0 % of 60 scenes (90 % interval 71 to 91 %; fleet's head 76.0 % on the same, +7.0 points)", or why there is none."""
        rest = "; ".join(filter(None, (self.reach, self.gain)))
        return f"{self.figure} ({rest})" if rest else self.figure


class DeviceWords(NamedTuple):
    """What a device predicts with, and how good that is: shown in these words by the device, the fleet's list and the dashboard."""

    head: str
    measured: MeasuredAccuracy

    @classmethod
    def of_report(
        cls, kind: str, labels: int, found: Mapping[str, float] | None, *, full: bool = False
    ) -> Self:
        """From the device's newest report on a head, of a full device the newest with an accuracy; None before the first."""
        if found is None:
            return cls(NOTHING_YET, MeasuredAccuracy(None, 0))
        if full:
            return cls(OWN_MODEL, MeasuredAccuracy.of_report(found)._replace(counted=TEST_IMAGES))
        return cls(fitted_words(kind, labels, found), MeasuredAccuracy.of_report(found))


def head_words(kind: str, labels: int, own_weight: float = 0.0) -> str:
    """What a head is, by its kind, the number of labels it was fitted on, and how far it follows from these alone (0..1)."""
    if kind not in FROM_FLEET:
        return kind
    if not labels:
        return NOT_PERSONAL
    return OWN if own_weight > OWN_ABOVE else WITH_LABELS


def fitted_words(kind: str, labels: int, found: Mapping[str, float]) -> str:
    """What a head is, by its kind, labels and metrics in a device's report; "" without a kind."""
    return head_words(kind, labels, found.get(metrics.OWN_WEIGHT, 0.0))


def contradiction(calibration: Calibration, classes: Sequence[str]) -> str:
    """One line if the fleet's head calls most labels of a class another one; "" if not."""
    pairs = [
        (own, other) for own, other in calibration.contradicted.tolist() if max(own, other) < len(classes)
    ]
    if not pairs:
        return ""
    named = ", ".join(f"{classes[own]!r} is {classes[other]!r} to it" for own, other in pairs)
    return f"labels contradict the fleet's head: most of {named}; look whether these are in the right folders"


def weakest_class(calibration: Calibration, classes: Sequence[str]) -> str:
    """One line on the class that the head is right about least often, if its 90 % interval is below the accuracy of all; "" if not.

    Like "least often right: 'cat', 33.3 % of 9 scenes (90 % interval 12 to 65 %)". Of a class with fewer than LEAST_MEASURED scenes nothing
    is said.
    """
    labels = np.unique(calibration.labels[calibration.labels < len(classes)])
    measured = [found for label in labels if (found := calibration.of_class(label)).is_measured]
    weakest = min(measured, key=lambda found: found.interval[1], default=calibration)
    if weakest.right.all() or weakest.interval[1] >= calibration.accuracy:
        return ""
    return (
        f"least often right: {classes[weakest.labels[0]]!r}, {MeasuredAccuracy.of_calibration(weakest).words}"
    )
