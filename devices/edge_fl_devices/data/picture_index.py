"""What is known of picture files after they were decoded once: FOLDER/features/*.pictures, one file per way of reading.

A picture is found again by path, size and times of its file; after a move to another folder by name, inode, size and time, because its
class is its folder. So neither a restart nor a fit decodes pictures that have not changed.

Rows are appended in steps (`edge_fl_devices.storage.rows`). A row is a struct of named fields; fields that are added later have defaults,
and another VERSION starts anew.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups
from edge_fl.data.samples import Images
from edge_fl.files.disk import reporting
from edge_fl.files.paths import raw, text
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.data import origins
from edge_fl_devices.data.location import file_digest
from edge_fl_devices.data.origins import Origin
from edge_fl_devices.storage.rows import RowFile

VERSION = 3
SUFFIX = ".pictures"
KEPT_FILES = 3
SPARE_ROWS = 500
"""Rows of files that are gone, beyond as many as are in use, before the file is written anew."""


class PictureFacts(Struct, frozen=True):
    """What the split and the fit need of a picture: key of its pixels (`data.split.key`) and position in the split.

    reason: why the file is skipped, "" if it is usable; detail: for this machine. thumbnail (`grouping.thumbnails`) and origin,
    None for an image of an array, tell which pictures belong together.
    bits: the range of 16-bit pictures with which it was read (`Depth.scale`); used: what it uses
    itself (`edge_fl.data.depth.Used`).
    """

    key: bytes = b""
    position: float = 0.0
    reason: str = ""
    detail: str = ""
    thumbnail: bytes = b""
    origin: Origin | None = None
    bits: int = 0
    used: tuple[int, bool] = (0, False)


def groups_of(facts: Sequence[PictureFacts], side: int = 0, given: Groups | None = None) -> Groups:
    """Which pictures belong together: near duplicates, those of one minute or recording, and those of one group of `given` [n].

    side: the shorter side in pixels of images without an origin.
    """
    thumbs = np.frombuffer(b"".join(each.thumbnail for each in facts), np.uint8).reshape(-1, grouping.SIDE**2)
    known = [each.origin for each in facts if each.origin]
    sides = [each.side for each in known] or [side] * len(facts)
    alike = grouping.near_duplicates(thumbs, grouping.nearness(np.array(sides)))
    return grouping.joined(alike, origins.grouped(known), grouping.alone() if given is None else given)


class _Row(Struct, frozen=True):
    """Facts of a file by the digests of its state, of what stays when it moves, and of its path."""

    file: bytes
    moved: bytes
    path: bytes
    facts: PictureFacts

    @classmethod
    def of(cls, path: Path, stat: os.stat_result, facts: PictureFacts) -> "_Row":
        state = b"\0%d %d %d" % (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return cls(file_digest(path, stat), _digest(raw(path.name) + state), _digest(raw(path)), facts)


class PictureIndex:
    """The facts of picture files as read in one way, which `reading` describes completely. For any thread.

    `facts` derives them from the pixels.
    """

    def __init__(self, folder: Path, reading: object, facts: Callable[[Images], PictureFacts]) -> None:
        described = hashlib.blake2b(repr((VERSION, reading)).encode(), digest_size=16).hexdigest()
        self.path = folder / f"{described}{SUFFIX}"
        self.facts = facts
        self._file = RowFile(self.path)
        self._by_file: dict[bytes, _Row] = {}
        self._by_move: dict[bytes, _Row] = {}
        self._new: list[_Row] = []
        self._used: set[bytes] = set()
        self._lock = threading.Lock()
        decoder = msgspec.msgpack.Decoder(_Row)
        with suppress(*NOT_JSON):
            for row in map(decoder.decode, self._file.read()):
                self._by_file[row.file] = self._by_move[row.moved] = row

    def find(self, path: Path, stat: os.stat_result) -> PictureFacts | None:
        """Return what is known of a file; None if it is new or has changed."""
        wanted = _Row.of(path, stat, PictureFacts())
        with self._lock:
            self._used.add(wanted.file)
            if row := self._by_file.get(wanted.file):
                return row.facts
            # at the same path with other times it is not moved, but written anew
            if (row := self._by_move.get(wanted.moved)) and row.path != wanted.path:
                self._remember(msgspec.structs.replace(wanted, facts=row.facts))
                return row.facts
        return None

    def add(self, path: Path, stat: os.stat_result, facts: PictureFacts) -> None:
        """Add the facts of a file; `flush` writes them. stat: from before it was opened."""
        with self._lock:
            self._remember(_Row.of(path, stat, facts))

    def flush(self) -> None:
        """Append what is new. Raises ArtefactError for a full disk."""
        with self._lock, reporting(text(self.path)):
            if self._new:
                self._file.append(map(msgspec.msgpack.encode, self._new))
                self._new.clear()

    def tidy(self) -> None:
        """After a complete reading: write what is new, or all anew if most of it is of files that are gone. Raises ArtefactError."""
        used = [row for file, row in self._by_file.items() if file in self._used]
        if len(self._by_file) > 2 * len(used) + SPARE_ROWS:
            with self._lock, reporting(text(self.path)):
                self._file.replace(map(msgspec.msgpack.encode, used))
                self._by_file = {row.file: row for row in used}
                self._by_move = {row.moved: row for row in used}
                self._new.clear()
        self.flush()
        self._file.evict(KEPT_FILES)

    def _remember(self, row: _Row) -> None:
        self._used.add(row.file)
        if self._by_file.get(row.file) == row:
            return  # decoded for another extractor
        self._by_file[row.file] = self._by_move[row.moved] = row
        self._new.append(row)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
