"""Features of files from one extractor, a row per sample, and the groups of samples that belong together, in an append-only file.

It is FOLDER/labelling/*.rows, which the label page writes; a fit of the agent reads the features of the pool from it. The rows of a file
follow one another; they are found by its inode, size and time, so a labelled file keeps its rows when it moves to the folder of its class,
and none has to be read again at a start, unlike with those of the agent (`edge_fl_devices.features.local_loader`), whose keys are samples.
Children read the file of rows themselves, so no process has to hold all features.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups, Thumbnails
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import raw, text
from edge_fl.files.shared import make_folder, open_private
from edge_fl.inputs import Kind
from edge_fl.modalities import kind_of
from edge_fl.modalities.limits import FULL_BITS
from edge_fl_devices.config import POOL
from edge_fl_devices.data import location
from edge_fl_devices.data.file_index import Origin, SampleFacts, groups_of, near_duplicates

KEY_BYTES, LEFT_BYTES = 16, 4
NO_RECORDING = bytes(KEY_BYTES)
VERSION = 3
SPARE_ROWS = 500
"""Rows of files that are gone, beyond as many as are in use, before the file is written anew."""
LABELLING = "labelling"
"""What the label page keeps in a device's folder."""
MOST_UNLABELLED = 300
"""Samples of the pool that a fit uses, for class shares and distances: those of the first files by name, which is random."""

Features = NDArray[np.float32]
Rows = NDArray[np.int64]


class FeatureRows:
    """The features by file, of 16-bit pictures scaled from `bits`; other files of features in `folder` are deleted.

    Raises ArtefactError if it cannot be written.
    """

    def __init__(self, folder: Path, extractor: str, dim: int, bits: int = 0) -> None:
        self.path, self._dim = _path(folder, extractor, bits), dim
        with reporting(text(self.path)):
            make_folder(folder, 0o700)
            for other in folder.glob("*.rows"):
                if other != self.path:
                    other.unlink(missing_ok=True)
            os.close(open_private(self.path, os.O_WRONLY))
            with self.path.open("rb") as file:
                self._index = _index(file, _record(dim).itemsize)
            whole = max((rows.stop for rows in self._index.values()), default=0)
            os.truncate(
                self.path, whole * _record(dim).itemsize
            )  # a power cut may leave part of a file's rows
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def rows(self, keys: Iterable[bytes]) -> Rows:
        """Return the rows of files, those of the first file first; valid until `keep`."""
        return np.array([row for key in keys for row in self._index[key]], np.int64)

    def counts(self, keys: Iterable[bytes]) -> Rows:
        """Return how many rows each file has."""
        return np.array([len(self._index[key]) for key in keys], np.int64)

    def find(self, key: bytes) -> Features | None:
        """Return the features [n, d] of a file, if they are known; from any thread."""
        with self._lock:
            rows = self._index.get(key)
            return None if rows is None else read(self.path, self._dim, rows)

    def add(
        self, key: bytes, z: Features, thumbnails: Thumbnails | None = None, origin: Origin | None = None
    ) -> None:
        """Append features z [n, d] of a file, of a picture its thumbnails [n, SIDE²] and origin. Raises ArtefactError for a full disk."""
        record = np.zeros(len(z), _record(self._dim))
        record["key"], record["z"], record["left"] = np.void(key), z, np.arange(len(z))[::-1]
        if thumbnails is not None and origin:
            record["thumbnail"], record["side"] = thumbnails, origin.side
            record["seconds"], record["certain"] = origin.seconds, origin.certain
            film = location.digest(raw(origin.recording)) if origin.recording else NO_RECORDING
            record["recording"] = np.void(film)
        with reporting(text(self.path)), self.path.open("ab") as file:
            end = file.tell()
            try:
                file.write(record.tobytes())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, end)
                raise
        first = end // _record(self._dim).itemsize
        self._index[key] = range(first, first + len(z))

    def keep(self, keys: Iterable[bytes]) -> None:
        """Write the file anew with the rows of these files only, if most of it belongs to others. Raises ArtefactError."""
        used = {key: rows for key in keys if (rows := self._index.get(key))}
        if len(self._index) <= 2 * len(used) + SPARE_ROWS:
            return
        with self._lock, reporting(text(self.path)):
            with atomic.writing(self.path, private=True) as file:
                for rows in used.values():
                    file.write(_mapped(self.path, self._dim)[rows.start : rows.stop].tobytes())
            with self.path.open("rb") as file:
                self._index = _index(file, _record(self._dim).itemsize)


def read(path: Path, dim: int, rows: Sequence[int] | Rows) -> Features:
    """Read features [n, d] of these rows."""
    return np.array(_mapped(path, dim)["z"][np.asarray(rows, np.int64)], np.float32)


def of_pool(folder: Path, extractor: str, dim: int, bits: int = 0) -> Features:
    """Features [m, d] of samples in the pool of the device in `folder`, as far as the label page has computed them; m may be 0."""
    record = _record(dim)
    z, found = np.empty((MOST_UNLABELLED, dim), np.float32), 0
    try:
        with _path(folder / LABELLING, extractor, bits).open("rb") as file:
            index = _index(file, record.itemsize)
            for path in sorted(filter(kind_of, (folder / POOL).iterdir())):
                with suppress(FileNotFoundError):  # labelled or dropped at this moment
                    for row in index.get(file_key(path), range(0))[: MOST_UNLABELLED - found]:
                        content = os.pread(file.fileno(), record.itemsize, row * record.itemsize)
                        z[found] = np.frombuffer(content, record)["z"][0]
                        found += 1
    except OSError:
        return z[:0]
    return z[:found]


def read_groups(path: Path, dim: int, rows: Rows, kind: Kind = "picture") -> Groups:
    """Read which samples of these rows belong together: groups [n], empty if all are alone."""
    return groups_of(_facts(path, dim, rows, kind), kind=kind)


def read_near_duplicates(path: Path, dim: int, rows: Rows) -> Groups:
    """Read which samples of these rows are nearly the same picture: groups [n], empty if none are."""
    return near_duplicates(_facts(path, dim, rows, "picture"))


def _facts(path: Path, dim: int, rows: Rows, kind: Kind) -> list[SampleFacts]:
    facts = []
    for each in _mapped(path, dim)[rows]:
        file = each["key"].tobytes()
        if kind != "picture":
            facts.append(SampleFacts(key=each["z"].tobytes(), file=file))
            continue
        recording = each["recording"].tobytes()
        name = recording.hex() if recording != NO_RECORDING else ""
        origin = Origin(float(each["seconds"]), bool(each["certain"]), name, int(each["side"]))
        facts.append(SampleFacts(thumbnail=each["thumbnail"].tobytes(), origin=origin, file=file))
    return facts


def file_key(path: Path) -> bytes:
    """Return the key of a file. Raises OSError."""
    return location.file_key(path.stat())


def _path(folder: Path, extractor: str, bits: int) -> Path:
    scaled = f"-{bits}" if 0 < bits < FULL_BITS else ""
    return folder / f"{extractor}-v{VERSION}{scaled}.rows"


def _index(file: BinaryIO, size: int) -> dict[bytes, range]:
    """The rows by key of a file of records of `size` bytes; not mapped, which would count as memory. A torn last file is left out."""
    found, first = dict[bytes, range](), 0
    for row in range(os.fstat(file.fileno()).st_size // size):
        head = os.pread(file.fileno(), KEY_BYTES + LEFT_BYTES, row * size)
        if not int.from_bytes(head[KEY_BYTES:], "little"):
            found[head[:KEY_BYTES]], first = range(first, row + 1), row + 1
    return found


def _record(dim: int) -> np.dtype[np.void]:
    origin = [("seconds", "<f8"), ("certain", "?"), ("side", "<u4"), ("recording", f"V{KEY_BYTES}")]
    start = [("key", f"V{KEY_BYTES}"), ("left", f"<u{LEFT_BYTES}")]  # left: how many rows of the file follow
    return np.dtype([*start, ("thumbnail", "u1", (grouping.SIDE**2,)), *origin, ("z", "<f4", (dim,))])


def _mapped(path: Path, dim: int) -> NDArray[np.void]:
    record = _record(dim)
    whole = path.stat().st_size // record.itemsize  # a row that is being added grows page by page
    return np.memmap(path, record, "r", shape=(whole,)) if whole else np.zeros(0, record)
