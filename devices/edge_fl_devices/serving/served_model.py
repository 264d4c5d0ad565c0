"""The served model: an extractor and the head fitted on it.

Heads are stored per extractor, in a file named after the extractor's hash. The installed release is served once a head is fitted on it;
until then, and after a rollback, the previous release with its own head is served. A later release of the same extractor may append
classes: the head for fewer classes is served with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_fl_devices.storage.slots import Installed, Slots
from edge_fl_devices.storage.store import Store, StoredHead


@dataclass(frozen=True, eq=False)
class ServedModel:
    """An installed release with its head."""

    installed: Installed
    stored: StoredHead


def serving(store: Store, slots: Slots) -> ServedModel | None:
    """Return the model to predict with; None before the first head."""
    for installed in (slots.current(), slots.previous()):
        stored = store.head(installed.manifest.extractor.sha256) if installed else None
        # a head for more classes than the release names belongs to a later release of the same extractor
        if installed and stored and stored.head.classes <= len(installed.manifest.classes):
            return ServedModel(installed, stored)
    return None


def installed_extractors(slots: Slots) -> set[str]:
    """Return the hashes of the installed extractors, whose heads are kept."""
    return {release.manifest.extractor.sha256 for release in (slots.current(), slots.previous()) if release}
