"""Whether one pair of extractor and head is worse than another, on the same held-out images: counted, not guessed."""

from __future__ import annotations

from devices.sight.views import Seen, View
from edge_fl.heads import Head


def is_worse(old: Head, old_view: View, new: Head, new_view: View) -> bool:
    """True if, of the held-out images on which the two differ in being right, the old pair has significantly more.

    Held out are the validation images, or the test images where there is no validation set. With `lost` images that only the old pair
    gets right and `won` that only the new one does, the new one is worse if lost - won > sqrt(lost + won): one standard deviation of what
    two equally good pairs would show (McNemar), so that one image alone never decides.
    """
    lost, won = changes(old, held_out(old_view), new, held_out(new_view))
    return lost > won and (lost - won) ** 2 > lost + won


def changes(old: Head, old_seen: Seen, new: Head, new_seen: Seen) -> tuple[int, int]:
    """Of the same images through two pairs: how many only the old one gets right, and how many only the new one."""
    if not len(new_seen):
        return 0, 0
    old_right = old.predict(old_seen.z) == old_seen.y
    new_right = new.predict(new_seen.z) == new_seen.y
    return int((old_right & ~new_right).sum()), int((new_right & ~old_right).sum())


def held_out(view: View) -> Seen:
    """What choices are made on: never what a head was fitted on."""
    return view.validation if len(view.validation) else view.test
