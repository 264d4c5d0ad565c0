"""Compare a new model with the served one on the same held-out samples, and measure both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge_fl import metrics
from edge_fl.data import grouping
from edge_fl.data.grouping import Groups
from edge_fl.heads import Head
from edge_fl.heads.auto import Choice
from edge_fl.heads.probability_calibration import Calibration
from edge_fl.heads.promise import UNMEASURED
from edge_fl.release.manifests import Manifest
from edge_fl_devices.features.client_features import ClientFeatures, FeatureSet
from edge_fl_devices.serving.served_model import ServedModel
from edge_fl_devices.workers.fits import Fits, Inputs

Answers = NDArray[np.bool_]
BEFORE = (metrics.PERSONAL_BEFORE, metrics.PERSONAL_VALIDATION_BEFORE)
AFTER = (metrics.PERSONAL_AFTER, metrics.PERSONAL_VALIDATION_AFTER)


@dataclass(frozen=True)
class FleetsComparison:
    """The fleet's head of the new release alone, and what it loses and gains against that of the served one (None: not compared)."""

    head: Head | None = None
    changes: tuple[int, int] | None = None


@dataclass(frozen=True)
class BroadcastComparison:
    """Samples that only the served model classifies correctly, those that only the new one does, and whether the new one is worse.

    `old` is the head that was compared with the new one, unless by cross-validation. `fleets`: the same for the fleet's heads alone.
    promise: losses and gains of samples whose prediction set has the right class; None where these were not compared.
    """

    lost: int = 0
    gained: int = 0
    worse: bool = False
    old: Head | None = None
    fleets: FleetsComparison = FleetsComparison()
    promise: tuple[int, int] | None = None


def compare(fits: Fits, choice: Choice, inputs: Inputs) -> BroadcastComparison:
    """Compare the new model with the served one on samples that neither was fitted on."""
    served, features = inputs.served, inputs.served_features
    fleets = _compare_fleets(fits, inputs)
    if served is None or features is None:
        return BroadcastComparison(fleets=fleets)
    if inputs.pooled:
        return replace(_compare_out_of_fold(fits, choice, inputs, served, features.pool), fleets=fleets)
    old, calibration = served.stored.head, served.stored.calibration
    if served.installed.manifest.input != inputs.manifest.input:
        again = fits.fit_as_served(served, inputs, features.train)
        old, calibration = again.head, again.calibration
    lost, gained = disagreements(old, features.test, choice.head, inputs.features.test)
    worse = is_worse(old, features, choice.head, inputs.features)
    before, now = (
        _inside(old, calibration, features.test),
        _inside(choice.head, choice.calibration, inputs.features.test),
    )
    kept = None if before is None or now is None else changed(before, now, inputs.features.test.groups)
    return BroadcastComparison(lost, gained, worse, old, fleets, kept)


def _inside(head: Head, calibration: Calibration, data: FeatureSet) -> Answers | None:
    """Whether the prediction set of each test sample has its class, as far as sets follow from the release alone; None if not known."""
    if not len(data) or calibration.promise is UNMEASURED or head.classes <= data.y.max():
        return None
    return calibration.promise.insides(head.logits(data.z), data.y)


def _compare_fleets(fits: Fits, inputs: Inputs) -> FleetsComparison:
    """Compare the fleet's heads of both releases alone: devices without labels serve them, and own labels hide what they lose.

    No own label is in them, so with few samples all are used.
    """
    served, old_features, classes = inputs.served, inputs.served_features, len(inputs.manifest.classes)
    before = (
        served.installed if served and not _is_same_fit(served.installed.manifest, inputs.manifest) else None
    )
    if not len(inputs.fitted) or (inputs.pooled and before is None):
        return FleetsComparison()
    new = fits.fleets_head(inputs.installed, classes)
    old = fits.fleets_head(before, classes) if new and before else None
    if new is None or old is None or old_features is None:
        return FleetsComparison(new)
    sets = [features.pool if inputs.pooled else features.test for features in (old_features, inputs.features)]
    if len(sets[0]) != len(sets[1]):
        return FleetsComparison(new)
    return FleetsComparison(new, disagreements(old, sets[0], new, sets[1]))


def _is_same_fit(one: Manifest, other: Manifest) -> bool:
    """Whether heads follow from the same on both releases."""
    return (one.extractor, one.extras, one.heads) == (other.extractor, other.extras, other.heads)


def _compare_out_of_fold(
    fits: Fits, choice: Choice, inputs: Inputs, served: ServedModel, old: FeatureSet
) -> BroadcastComparison:
    """Cross-validate a head as on the served release too, on the same samples and folds."""
    if _is_same_fit(served.installed.manifest, inputs.manifest) or len(old) != len(inputs.fitted):
        return BroadcastComparison()
    before, now = fits.fit_as_served(served, inputs, old).calibration, choice.calibration
    if len(before.right) != len(now.right):
        return BroadcastComparison()
    lost, gained = changed(before.right, now.right, now.groups)
    kept = changed(before.promise.inside, now.promise.inside, now.groups) if len(now.right) else None
    return BroadcastComparison(lost, gained, is_significant(lost, gained), promise=kept)


def measure(choice: Choice, inputs: Inputs, compared: BroadcastComparison) -> dict[str, float]:
    """Numbers of groups, and accuracies and latency of the new model and, where comparable, of the served one and of the fleet's head.

    Of a few labels there is no accuracy (`edge_fl.heads.probability_calibration.LEAST_MEASURED`).
    """
    features, old, old_features = inputs.features, inputs.served, inputs.served_features
    calibrations = (old.stored.calibration if old else None, choice.calibration)
    sizes = {
        metrics.TEST_SAMPLES: float(choice.calibration.scenes if inputs.pooled else features.test.scenes),
        metrics.VALIDATION_SAMPLES: float(0 if inputs.pooled else features.validation.scenes),
    }
    numbers = {**sizes, metrics.LATENCY_AFTER: features.latency_ms}
    if inputs.pooled:
        numbers |= {
            name: calibration.accuracy
            for name, calibration in zip((BEFORE[0], AFTER[0]), calibrations, strict=True)
            if calibration and calibration.is_measured
        }
        found = choice.calibration
        if found.is_measured and found.fleet_accuracy is not None:
            numbers[metrics.FLEET] = found.fleet_accuracy
        if found.is_measured:
            numbers[metrics.TEST_EFFECTIVE] = found.independent
    else:
        numbers |= _accuracies(choice.head, features, AFTER)
        if compared.fleets.head:
            numbers |= _accuracies(compared.fleets.head, features, (metrics.FLEET, ""))
        if len(features.test.importance):
            numbers[metrics.TEST_EFFECTIVE] = grouping.effective(
                features.test.groups, len(features.test), features.test.importance
            )
    if len(choice.calibration.fleet):
        numbers[metrics.OWN_WEIGHT] = choice.calibration.own_weight
    if compared.fleets.changes is not None:
        lost, gained = compared.fleets.changes
        numbers |= {metrics.FLEET_LOST: float(lost), metrics.FLEET_GAINED: float(gained)}
    if compared.promise is not None:
        lost, gained = compared.promise
        numbers |= {metrics.PROMISE_LOST: float(lost), metrics.PROMISE_GAINED: float(gained)}
    if old is None or old_features is None:
        return numbers
    if compared.old:
        numbers |= _accuracies(compared.old, old_features, BEFORE)
    return {
        **numbers,
        metrics.LATENCY_BEFORE: old_features.latency_ms,
        metrics.TEST_LOST: float(compared.lost),
        metrics.TEST_GAINED: float(compared.gained),
    }


def _accuracies(head: Head, features: ClientFeatures, names: tuple[str, str]) -> dict[str, float]:
    """Accuracies on the test and validation sets that have samples."""
    sets = zip(names, (features.test, features.validation), strict=True)
    return {
        name: grouping.mean(head.predict(data.z) == data.y, data.groups, data.importance)
        for name, data in sets
        if name and len(data)
    }


def is_worse(old: Head, old_features: ClientFeatures, new: Head, new_features: ClientFeatures) -> bool:
    """Whether the new model is significantly worse on the held-out samples.

    Held out are the validation samples, or the test samples without a validation set. With `lost` groups of samples of which only the old
    model classifies more correctly and `won` of which the new one does, the new one is worse if lost - won > sqrt(lost + won): one standard
    deviation for two equally good models (McNemar's test), so a single sample, or the frames of a single scene, never decide.
    """
    return is_significant(*disagreements(old, held_out(old_features), new, held_out(new_features)))


def is_significant(lost: int, won: int) -> bool:
    """Whether more groups were lost than won, by more than one standard deviation."""
    return lost > won and (lost - won) ** 2 > lost + won


def disagreements(
    old: Head, old_features: FeatureSet, new: Head, new_features: FeatureSet
) -> tuple[int, int]:
    """Count the groups of which the old model classifies more samples correctly, and those of which the new one does."""
    if not len(new_features):
        return 0, 0
    old_right = old.predict(old_features.z) == old_features.y
    new_right = new.predict(new_features.z) == new_features.y
    return changed(old_right, new_right, new_features.groups)


def changed(old_right: Answers, new_right: Answers, groups: Groups) -> tuple[int, int]:
    """Count the groups lost and won by which samples [n] were classified correctly; a sample that is alone is a group."""
    gains = np.bincount(
        grouping.numbers(groups, len(new_right)), new_right.astype(np.int64) - old_right.astype(np.int64)
    )
    return int((gains < 0).sum()), int((gains > 0).sum())


def held_out(features: ClientFeatures) -> FeatureSet:
    """Return the validation set, or the test set where validation is empty."""
    return features.validation if len(features.validation) else features.test
