"""What a device serves: an extractor and the head that was fitted on it, never a mix.

There is a head per extractor, in a file named after the extractor's hash. The pair that serves is the installed release's, or, until a
head is fitted on that, the pair of the release before it; so a rollback finds its old head, and no step in between is half.
"""

from __future__ import annotations

from dataclasses import dataclass

from devices.storage.slots import Installed, Slots
from devices.storage.store import Store, StoredHead


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A release on this device with its head."""

    installed: Installed
    stored: StoredHead


def serving(store: Store, slots: Slots) -> ServedModel | None:
    """The pair to predict with; None before the first head."""
    for installed in (slots.current(), slots.previous()):
        if installed and (stored := store.head(installed.manifest.extractor.sha256)):
            return ServedModel(installed, stored)
    return None


def installed_extractors(slots: Slots) -> set[str]:
    """The hashes whose heads are worth keeping."""
    return {found.manifest.extractor.sha256 for found in (slots.current(), slots.previous()) if found}
