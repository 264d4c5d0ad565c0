"""What is known of files of samples after they were read once: FOLDER/features/*.files, one file per way of reading.

A file is found again by path, size and times; after a move to another folder by name, inode, size and time, because its class is its
folder. So neither a restart nor a fit reads files that have not changed. Rows, one per file with the facts of all its samples, are appended
in steps (`edge_fl_devices.storage.rows`). A row is a struct of named fields; fields that are added later have defaults, and another VERSION
starts anew.

Samples of one recording are one group (`edge_fl.data.grouping`). A picture's origin is when it was taken, and of which recording it is a
frame: pictures of one minute, and frames of one recording, belong together.

- A name may contain the time (IMG_20240131_142530.jpg, 2024-01-31 14.25.30.png), or be NAME_frame_0001.jpg: NAME is the recording.
- EXIF: DateTimeOriginal of a JPEG, if it is later than 1990 (cameras without a clock write less).
- The file's time is when the picture was written. That is when it was taken if a camera wrote it, and when it was copied if not. A copy
  writes many files at once, so the times of a minute count only if at most MOST_OF_A_MINUTE pictures have one in it, at least APART_S
  apart. Bursts are faster, and are found by their near duplicates instead.
"""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups
from edge_fl.data.samples import Array
from edge_fl.files.disk import reporting
from edge_fl.files.paths import raw, text
from edge_fl.inputs import Kind
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.data.location import digest, file_digest
from edge_fl_devices.storage.rows import RowFile

if TYPE_CHECKING:
    from edge_fl.modalities.pictures import Header

MINUTE_S = 60
MOST_OF_A_MINUTE = 12
APART_S = 1.0
FIRST_YEAR = 1990
NAMED_TIME = re.compile(
    r"(?<!\d)(\d{4})[-_.:]?(\d\d)[-_.:]?(\d\d)[-_.:T ]?(\d\d)[-_.:h]?(\d\d)[-_.:m]?(\d\d)(?:[-_.]?\d{3})?(?!\d)"
)
FRAME = re.compile(r"(.+?)[-_. ]+frame[-_. ]*\d+", re.IGNORECASE)
VERSION = 4
SUFFIX = ".files"
KEPT_FILES = 3
RECORDED: tuple[Kind, ...] = ("series", "audio")
"""Kinds of which a file is one recording."""
SPARE_ROWS = 500
"""Rows of files that are gone, beyond as many as are in use, before the file is written anew."""


class Origin(NamedTuple):
    """Where a picture comes from: when it was taken, in seconds since 1970 of whatever time zone.

    certain: not only the time of its file. recording: name of the recording that the picture is a frame of, or "". side: its shorter side
    in pixels.
    """

    seconds: float
    certain: bool = False
    recording: str = ""
    side: int = grouping.SMALL


def origin(path: Path, header: Header) -> Origin:
    """Return the origin of a picture file by its name and header."""
    frame = FRAME.fullmatch(path.stem)
    taken = _seconds(NAMED_TIME.search(path.stem)) or _seconds(NAMED_TIME.match(header.taken))
    return Origin(taken or header.written_s, taken > 0, frame[1] if frame else "", min(header.size))


def grouped(origins: Sequence[Origin]) -> Groups:
    """Group pictures by minute and recording."""
    if not origins:
        return grouping.alone()
    seconds = np.array([each.seconds for each in origins])
    certain = np.array([each.certain for each in origins])
    minutes = (seconds // MINUTE_S).astype(np.int64)
    uncertain = np.where(certain, -1, minutes)
    order = np.lexsort((seconds, uncertain))
    for rows in np.split(order, np.flatnonzero(np.diff(uncertain[order])) + 1):
        if len(rows) > MOST_OF_A_MINUTE or (np.diff(seconds[rows]) < APART_S).any():
            uncertain[rows] = -1
    recordings = _numbers([each.recording for each in origins])
    return grouping.joined(np.where(certain, minutes, -1), uncertain, recordings)


def _numbers(names: Sequence[Hashable]) -> Groups:
    """Number equal names alike, -1 for an empty one."""
    known = {name: number for number, name in enumerate(dict.fromkeys(filter(None, names)))}
    return np.array([known.get(name, -1) for name in names], np.int64)


def _seconds(found: re.Match[str] | None) -> float:
    """The time of a match of NAMED_TIME, in seconds since 1970; 0 if it is none."""
    if not found:
        return 0.0
    try:
        taken = datetime(*map(int, found.groups()), tzinfo=UTC)  # type: ignore[misc, arg-type]
    except ValueError:
        return 0.0
    return taken.timestamp() if taken.year >= FIRST_YEAR else 0.0


class SampleFacts(Struct, frozen=True):
    """What the split and the fit need of a sample: key of its values (`data.split.key`) and position in the split.

    thumbnail (`Modality.thumbnails`) and origin of a picture tell which ones belong together; without them b"" and None. origin and file
    (`edge_fl_devices.data.location.file_key`, b"": of an array) are of a reading, not of the index.
    """

    key: bytes = b""
    position: float = 0.0
    thumbnail: bytes = b""
    origin: Origin | None = None
    file: bytes = b""


class FileFacts(Struct, frozen=True):
    """What is known of a file: its samples, in its order (none: only its header was read), and remarks on its quality.

    reason: why the file is skipped, "" if it is usable; detail: for this machine. Of a picture: its origin; bits: the range of 16-bit
    pictures with which it was read (`Depth.scale`); used: what it uses itself (`edge_fl.modalities.pictures.Used`).
    """

    samples: tuple[SampleFacts, ...] = ()
    reason: str = ""
    detail: str = ""
    remarks: tuple[str, ...] = ()
    origin: Origin | None = None
    bits: int = 0
    used: tuple[int, bool] = (0, False)

    @property
    def content(self) -> bytes:
        """The keys of all samples, equal for a copy of the file."""
        return b"".join(each.key for each in self.samples)

    def of(self, file: bytes) -> tuple[SampleFacts, ...]:
        """The facts of the samples as those of the file with this key."""
        return tuple(msgspec.structs.replace(each, origin=self.origin, file=file) for each in self.samples)


def groups_of(
    facts: Sequence[SampleFacts], side: int = 0, given: Groups | None = None, kind: Kind = "picture"
) -> Groups:
    """Which samples belong together: those of one recording and its copies, and of one group of `given` [n]; pictures also if they are near
    duplicates or of one minute.

    side: the shorter side in pixels of pictures without an origin.
    """
    known = [each.origin for each in facts if each.origin]
    alike = near_duplicates(facts, side)
    files = _numbers(_recordings(facts) if kind in RECORDED else [])
    return grouping.joined(alike, grouped(known), files, grouping.alone() if given is None else given)


def near_duplicates(facts: Sequence[SampleFacts], side: int = 0) -> Groups:
    """Which samples are nearly the same picture, or parts of a chain of such ones; `side` as of `groups_of`."""
    thumbs = np.frombuffer(b"".join(each.thumbnail for each in facts), "u1").reshape(-1, grouping.SIDE**2)
    sides = [each.origin.side for each in facts if each.origin] or [side] * len(facts)
    return grouping.near_duplicates(thumbs, grouping.nearness(np.array(sides)))


def _recordings(facts: Sequence[SampleFacts]) -> list[bytes]:
    """The recording of each sample: the keys of all samples of its file, which a copy shares, else the file; b"" without a file."""
    keys = defaultdict[bytes, list[bytes]](list)
    for each in facts:
        keys[each.file].append(each.key)
    recordings = {file: digest(b"".join(of_file)) if all(of_file) else file for file, of_file in keys.items()}
    return [recordings[each.file] if each.file else b"" for each in facts]


class _Row(Struct, frozen=True):
    """Facts of a file by the digests of its state, of what stays when it moves, and of its path."""

    file: bytes
    moved: bytes
    path: bytes
    facts: FileFacts

    @classmethod
    def of(cls, path: Path, stat: os.stat_result, facts: FileFacts) -> _Row:
        state = b"\0%d %d %d" % (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return cls(file_digest(path, stat), digest(raw(path.name) + state), digest(raw(path)), facts)


class FileIndex:
    """The facts of files as read in one way, which `reading` describes completely. For any thread.

    `facts` derives those of a sample from its values.
    """

    def __init__(self, folder: Path, reading: object, facts: Callable[[Array], SampleFacts]) -> None:
        self.path = folder / f"{digest(repr((VERSION, reading)).encode()).hex()}{SUFFIX}"
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

    def find(self, path: Path, stat: os.stat_result) -> FileFacts | None:
        """Return what is known of a file; None if it is new or has changed."""
        wanted = _Row.of(path, stat, FileFacts())
        with self._lock:
            self._used.add(wanted.file)
            if row := self._by_file.get(wanted.file):
                return row.facts
            # at the same path with other times it is not moved, but written anew
            if (row := self._by_move.get(wanted.moved)) and row.path != wanted.path:
                self._remember(msgspec.structs.replace(wanted, facts=row.facts))
                return row.facts
        return None

    def add(self, path: Path, stat: os.stat_result, facts: FileFacts) -> None:
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
            return  # read for another extractor
        self._by_file[row.file] = self._by_move[row.moved] = row
        self._new.append(row)
