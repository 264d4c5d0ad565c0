"""Growth of a fleet's class list: devices know a class by its place in the list, so a later release may only append to it."""

from __future__ import annotations

from collections.abc import Sequence

from edge_fl.data.arrays import shortened
from edge_fl.errors import InputError
from edge_fl.release.manifest import Manifest, extends


def require_same_ids(manifest: Manifest, kept: Sequence[Manifest]) -> None:
    """Raise InputError if a kept release of the same extractor, whose heads devices reuse, has other class ids."""
    for other in reversed(kept):
        if manifest.extractors & other.extractors and not extends(manifest.classes, other.classes):
            raise _error(manifest.classes, other)


def require_grown(classes: Sequence[str], kept: Sequence[Manifest]) -> None:
    """Raise InputError if `classes` reorder or remove those of the newest release; a list without any of them is another task."""
    if kept and set(classes) & set(kept[-1].classes) and not extends(classes, kept[-1].classes):
        raise _error(classes, kept[-1])


def _error(classes: Sequence[str], kept: Manifest) -> InputError:
    return InputError(
        f"classes {shortened(classes)}: release {kept.release} has {shortened(kept.classes)}, and devices know a class by its place;"
        " expected these in this order, with new ones after them (or another fleet)",
        consequence="nothing was published",
    )
