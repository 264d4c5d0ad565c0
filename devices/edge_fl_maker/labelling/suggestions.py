"""Suggested classes: unlabelled files that resemble each other and no class (`edge_fl_maker.labelling.immediate`), and those dismissed.

FOLDER/labelling/dismissed.suggestions    the keys of the files of the pool that are not suggested again
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl_devices.features.feature_rows import LABELLING
from edge_fl_devices.storage.rows import RowFile
from edge_fl_maker.labelling.immediate import LEAST_ALIKE

FILE = "dismissed.suggestions"


class Suggestions:
    """The suggestions of a device's folder; one process writes."""

    def __init__(self, folder: Path) -> None:
        self._file = RowFile(folder / LABELLING / FILE)
        self._dismissed = set(self._file.read())

    def first(self, groups: Iterable[Sequence[str]], keys: Mapping[str, bytes]) -> list[str]:
        """The first of the groups of names that has enough files with keys that are not dismissed; [] if there is none."""
        for group in groups:
            left = [name for name in group if name in keys and keys[name] not in self._dismissed]
            if len(left) >= LEAST_ALIKE:
                return left
        return []

    def dismiss(self, keys: Collection[bytes], present: Collection[bytes]) -> None:
        """Suggest these files no more, and forget those that are not `present`. Raises ArtefactError for a full disk."""
        kept = self._dismissed.intersection(present).union(keys)
        with reporting(text(self._file.path)):
            self._file.replace(sorted(kept))
        self._dismissed = kept
