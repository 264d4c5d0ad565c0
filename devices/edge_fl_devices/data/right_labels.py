"""Labels of which a person has said that they are right, so that they are not shown again as probably wrong.

    FOLDER/labelling/right.labels    a row per answer, appended; no sample is in it

`edge-fl device serve` writes it, for its label page; `edge-fl device doctor --labels` reads it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.storage.rows import RowFile

FILE = "labelling/right.labels"


class RightLabel(Struct, frozen=True, array_like=True):
    """The key of a file, which is another one once the file changes, and its class. undone: the answer was taken back."""

    key: bytes
    label: str
    undone: bool = False


class RightLabels:
    """The right labels of a device's folder; one process writes."""

    def __init__(self, folder: Path) -> None:
        self._file, self._known = RowFile(folder / FILE), set[tuple[bytes, str]]()
        decoder = msgspec.msgpack.Decoder(RightLabel)
        with suppress(*NOT_JSON):
            for row in map(decoder.decode, self._file.read()):
                self._take(row)

    def __contains__(self, label: tuple[bytes, str]) -> bool:
        return label in self._known

    def add(self, key: bytes, label: str) -> None:
        """Remember that a file has the right label. Raises ArtefactError for a full disk."""
        self._put(RightLabel(key, label))

    def undo(self, key: bytes, label: str) -> None:
        """Take an answer back. Raises ArtefactError for a full disk."""
        self._put(RightLabel(key, label, undone=True))

    def _put(self, row: RightLabel) -> None:
        with reporting(text(self._file.path)):
            self._file.append([msgspec.msgpack.encode(row)])
        self._take(row)

    def _take(self, row: RightLabel) -> None:
        (self._known.discard if row.undone else self._known.add)((row.key, row.label))
