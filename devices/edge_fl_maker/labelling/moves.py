"""Move files between the pool and the folders of their classes, so that a power cut at any line loses none.

    DATA/CLASS/NAME                   a labelled file: a hard link or a flushed copy of the pool's file, which is then removed
    FOLDER/labelling/discarded/NAME   a discarded file, kept for an undo; deleted at the next start, and beyond KEPT_DISCARDED

A lock serialises all changes, of other processes too. A file that a power cut left in both places counts as labelled (`settle`);
one that it left in two classes, while it was moved from one to the other, counts once, and is named as a copy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path

from edge_fl.data.class_names import LONGEST, flaw
from edge_fl.errors import DataError
from edge_fl.files import atomic
from edge_fl.files.disk import locked
from edge_fl.files.folder import walk
from edge_fl.files.paths import JOINERS, composed, text
from edge_fl.files.shared import make_folder
from edge_fl_maker.capture.pools import Pool

FOLDER, DISCARDED = "labelling", "discarded"
KEPT_DISCARDED = 50
LONGEST_FILE_NAME = 255  # bytes
NOTHING = "nothing was changed"


class Moves:
    """Labels and discards the files of `pool`; `data` is the folder of the classes, `folder` that of the device.

    Every method raises DataError for a file that is not where it should be, and ArtefactError if the disk is full or not writable; then
    the file stays where it was.
    """

    def __init__(self, pool: Pool, data: Path, folder: Path) -> None:
        self.data = data
        self._pool, self._folder = pool, folder / FOLDER
        shutil.rmtree(self._folder / DISCARDED, ignore_errors=True)

    def label(self, name: str, class_name: str) -> Path:
        """Move a file from the pool to the folder of its class; return its new path."""
        _require_class_name(class_name)
        return self._move(name, self._class_folder(class_name) / name)

    def discard(self, name: str) -> Path:
        """Move a file out of the pool, to be deleted; return its new path."""
        path = self._move(name, self._folder / DISCARDED / name)
        kept = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_ctime_ns)
        for old in kept[:-KEPT_DISCARDED]:
            old.unlink(missing_ok=True)
        return path

    def put_back(self, path: Path) -> None:
        """Move a labelled or discarded file back to the pool."""
        with locked(self._folder):
            try:
                content = path.read_bytes()
            except FileNotFoundError as error:
                raise DataError(
                    f"{text(path.name)}: moved or deleted since, expected in {text(path.parent.name)}",
                    NOTHING,
                ) from error
            self._pool.restore(path.name, content)
            path.unlink(missing_ok=True)
            atomic.flush_to_disk(path.parent)

    def relabel(self, path: Path, class_name: str, name: str = "") -> Path:
        """Move a labelled file to the folder of another class, under its own name or `name`; return its new path.

        Where another file has this name, a number is added.
        """
        _require_class_name(class_name)
        with locked(self._folder):
            wanted = self._class_folder(class_name) / (name or path.name)
            numbered = (wanted.with_stem(f"{wanted.stem}-{number}") for number in count(2))
            target = wanted if not wanted.exists() else next(each for each in numbered if not each.exists())
            make_folder(target.parent)
            try:
                atomic.link(path, target)
            except FileNotFoundError as error:
                raise DataError(
                    f"{text(path.name)}: moved or deleted since, expected in {text(path.parent.name)}",
                    NOTHING,
                ) from error
            path.unlink(missing_ok=True)
            atomic.flush_to_disk(path.parent)
        return target

    def add_class(self, name: str, known: Iterable[str] = ()) -> None:
        """Create the folder of a class.

        Raises DataError for a name that is unusable or already there: as a folder or among the `known` classes, in whatever case and
        Unicode form.
        """
        _require_class_name(name)
        for other in (*walk(self.data).folders, *known):
            if _folded(other) == _folded(name):
                raise DataError(f"class {name!r}: {other!r} is already there", NOTHING)
        with locked(self._folder):
            make_folder(self.data / name)

    def settle(self) -> None:
        """Remove files from the pool that a power cut left in the folder of a class as well."""
        labelled = {path.name for path in walk(self.data).files}
        for name in labelled.intersection(self._pool.names()):
            with suppress(DataError):  # labelled by another process at this moment
                self._pool.remove(name)

    def _class_folder(self, class_name: str) -> Path:
        """The folder of a class: one whose name is the same but for its Unicode form, if there is one."""
        path = self.data / class_name
        if path.is_dir() or class_name.isascii():
            return path
        same = (name for name in walk(self.data).folders if composed(name) == composed(class_name))
        return self.data / next(same, class_name)

    def _move(self, name: str, target: Path) -> Path:
        with locked(self._folder):
            source = self._pool.path(name)
            make_folder(target.parent)
            try:
                atomic.link(source, target)
            except FileNotFoundError as error:
                raise DataError(f"{name}: was dropped from the pool at this moment", NOTHING) from error
            self._pool.remove(name)
        return target


def shortened(name: str) -> tuple[str, str]:
    """Return what a class is named that is asked for by this name, in NFC, and a remark if it is shorter."""
    whole = composed(name).strip()
    kept = whole[:LONGEST]
    while len(os.fsencode(kept)) > LONGEST_FILE_NAME:
        kept = kept[:-1]
    kept = kept.rstrip(JOINERS).strip()
    remark = f"cut at {len(kept)} characters, of {len(whole)}" if kept != whole else ""
    return kept, remark


def _folded(name: str) -> str:
    return composed(composed(name).casefold())


def _require_class_name(name: str) -> None:
    if reason := flaw(name):
        raise DataError(f"class {name[:100]!r} {reason}", NOTHING)
