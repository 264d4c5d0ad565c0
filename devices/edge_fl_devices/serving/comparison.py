"""Compare two served models on the same held-out images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_fl.data import groups as grouping
from edge_fl.data.groups import Groups
from edge_fl.heads import Head
from edge_fl_devices.features.client_features import ClientFeatures, FeatureSet

Answers = NDArray[np.bool_]


def is_worse(old: Head, old_features: ClientFeatures, new: Head, new_features: ClientFeatures) -> bool:
    """Whether the new model is significantly worse on the held-out images.

    Held out are the validation images, or the test images without a validation set. With `lost` groups of images of which only the old
    model classifies more correctly and `won` of which the new one does, the new one is worse if lost - won > sqrt(lost + won): one standard
    deviation for two equally good models (McNemar's test), so a single image, or the frames of a single scene, never decide.
    """
    return is_significant(*disagreements(old, held_out(old_features), new, held_out(new_features)))


def is_significant(lost: int, won: int) -> bool:
    """Whether more groups were lost than won, by more than one standard deviation."""
    return lost > won and (lost - won) ** 2 > lost + won


def disagreements(
    old: Head, old_features: FeatureSet, new: Head, new_features: FeatureSet
) -> tuple[int, int]:
    """Count the groups of which the old model classifies more images correctly, and those of which the new one does."""
    if not len(new_features):
        return 0, 0
    old_right = old.predict(old_features.z) == old_features.y
    new_right = new.predict(new_features.z) == new_features.y
    return changed(old_right, new_right, new_features.groups)


def changed(old_right: Answers, new_right: Answers, groups: Groups) -> tuple[int, int]:
    """Count the groups lost and won by which images [n] were classified correctly; an image that is alone is a group."""
    gains = np.bincount(
        grouping.numbers(groups, len(new_right)), new_right.astype(np.int64) - old_right.astype(np.int64)
    )
    return int((gains < 0).sum()), int((gains > 0).sum())


def held_out(features: ClientFeatures) -> FeatureSet:
    """Return the validation set, or the test set where validation is empty."""
    return features.validation if len(features.validation) else features.test
