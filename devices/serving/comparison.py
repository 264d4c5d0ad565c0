"""Whether one pair of extractor and head is worse than another, on the same held-out images: counted, not guessed."""

from __future__ import annotations

from devices.features.client_features import ClientFeatures, FeatureSet
from edge_fl.heads import Head


def is_worse(old: Head, through_old: ClientFeatures, new: Head, through_new: ClientFeatures) -> bool:
    """True if, of the held-out images on which the two differ in being right, the old pair has significantly more.

    Held out are the validation images, or the test images where there is no validation set. With `lost` images that only the old pair
    gets right and `won` that only the new one does, the new one is worse if lost - won > sqrt(lost + won): one standard deviation of what
    two equally good pairs would show (McNemar), so that one image alone never decides.
    """
    lost, won = changes(old, held_out(through_old), new, held_out(through_new))
    return lost > won and (lost - won) ** 2 > lost + won


def changes(old: Head, through_old: FeatureSet, new: Head, through_new: FeatureSet) -> tuple[int, int]:
    """Of the same images through two pairs: how many only the old one gets right, and how many only the new one."""
    if not len(through_new):
        return 0, 0
    old_right = old.predict(through_old.z) == through_old.y
    new_right = new.predict(through_new.z) == through_new.y
    return int((old_right & ~new_right).sum()), int((new_right & ~old_right).sum())


def held_out(features: ClientFeatures) -> FeatureSet:
    """What choices are made on: never what a head was fitted on."""
    return features.validation if len(features.validation) else features.test
