"""Compare two served models on the same held-out images."""

from __future__ import annotations

from edge_fl.heads import Head
from edge_fl_devices.features.client_features import ClientFeatures, FeatureSet


def is_worse(old: Head, old_features: ClientFeatures, new: Head, new_features: ClientFeatures) -> bool:
    """Whether the new model is significantly worse on the held-out images.

    Held out are the validation images, or the test images without a validation set. With `lost` images that only the old model classifies
    correctly and `won` that only the new one does, the new one is worse if lost - won > sqrt(lost + won): one standard deviation for two
    equally good models (McNemar's test), so a single image never decides.
    """
    return is_significant(*disagreements(old, held_out(old_features), new, held_out(new_features)))


def is_significant(lost: int, won: int) -> bool:
    """Whether more images were lost than won, by more than one standard deviation."""
    return lost > won and (lost - won) ** 2 > lost + won


def disagreements(
    old: Head, old_features: FeatureSet, new: Head, new_features: FeatureSet
) -> tuple[int, int]:
    """Count the images that only the old model classifies correctly, and those that only the new one does."""
    if not len(new_features):
        return 0, 0
    old_right = old.predict(old_features.z) == old_features.y
    new_right = new.predict(new_features.z) == new_features.y
    return int((old_right & ~new_right).sum()), int((new_right & ~old_right).sum())


def held_out(features: ClientFeatures) -> FeatureSet:
    """Return the validation set, or the test set where validation is empty."""
    return features.validation if len(features.validation) else features.test
