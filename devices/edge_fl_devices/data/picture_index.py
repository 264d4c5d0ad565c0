"""What is known of picture files after they were decoded once: FOLDER/features/*.pictures, one file per way of reading.

A picture is found again by path, size and times of its file; after a move to another folder by name, inode, size and time, because its
class is its folder. So neither a restart nor a fit decodes pictures that have not changed.

Rows are appended in steps, each with its length and checksum, and flushed, so that a process that is killed loses none of them. The first
damaged row ends the file. A row is a struct of named fields; fields that are added later have defaults, and another VERSION starts anew.
"""

import hashlib
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups
from edge_fl.data.samples import Images
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import raw, text
from edge_fl.files.shared import make_folder, open_private
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.data import origins
from edge_fl_devices.data.location import file_digest
from edge_fl_devices.data.origins import Origin

VERSION = 3
SUFFIX = ".pictures"
KEPT_FILES = 3
SPARE_ROWS = 500
"""Rows of files that are gone, beyond as many as are in use, before the file is written anew."""
FRAME = struct.Struct("<II")  # length and CRC-32 of a row


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
        self._by_file: dict[bytes, _Row] = {}
        self._by_move: dict[bytes, _Row] = {}
        self._new: list[_Row] = []
        self._used: set[bytes] = set()
        self._lock = threading.Lock()
        self._end = self._load()

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
            if not self._new:
                return
            make_folder(self.path.parent, 0o700)
            with os.fdopen(open_private(self.path, os.O_RDWR), "r+b") as file:
                file.truncate(self._end)  # a row that a power cut or a full disk left incomplete
                file.seek(self._end)
                file.write(b"".join(map(_framed, self._new)))
                file.flush()
                os.fsync(file.fileno())
                self._end = file.tell()
            self._new.clear()

    def tidy(self) -> None:
        """After a complete reading: write what is new, or all anew if most of it is of files that are gone. Raises ArtefactError."""
        used = [row for file, row in self._by_file.items() if file in self._used]
        if len(self._by_file) > 2 * len(used) + SPARE_ROWS:
            with self._lock, reporting(text(self.path)):
                content = b"".join(map(_framed, used))
                atomic.write(self.path, content, private=True)
                self._by_file = {row.file: row for row in used}
                self._by_move = {row.moved: row for row in used}
                self._new, self._end = [], len(content)
        self.flush()
        with suppress(OSError):
            files = sorted(self.path.parent.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
            for old in [path for path in files if path != self.path][: -(KEPT_FILES - 1)]:
                old.unlink(missing_ok=True)

    def _remember(self, row: _Row) -> None:
        self._used.add(row.file)
        if self._by_file.get(row.file) == row:
            return  # decoded for another extractor
        self._by_file[row.file] = self._by_move[row.moved] = row
        self._new.append(row)

    def _load(self) -> int:
        """Read the rows; return where the first damaged one begins."""
        try:
            content = self.path.read_bytes()
            os.utime(self.path)
        except OSError:
            return 0
        end, decoder = 0, msgspec.msgpack.Decoder(_Row)
        with suppress(struct.error, *NOT_JSON):
            while end < len(content):
                length, checksum = FRAME.unpack_from(content, end)
                payload = content[end + FRAME.size : end + FRAME.size + length]
                if len(payload) < length or zlib.crc32(payload) != checksum:
                    break
                row = decoder.decode(payload)
                self._by_file[row.file] = self._by_move[row.moved] = row
                end += FRAME.size + length
        return end


def _framed(row: _Row) -> bytes:
    payload = msgspec.msgpack.encode(row)
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
