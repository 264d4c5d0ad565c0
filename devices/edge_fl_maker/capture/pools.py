"""The pool of files without labels in a device's folder; several processes may change it at once.

    FOLDER/unlabelled/NAME.jpg, .wav, ...   the files; NAME is a hash of the file
    FOLDER/unlabelled/index.jsonl           one line per file ever added, up to REMEMBERED, so that files that were labelled, discarded or
                                            dropped do not return

A full pool drops the least informative files, a share of SLACK at a time. Near duplicates of pictures are found by a difference hash:
whether brightness rises from left to right, in each cell of a coarse grid. (The package ImageHash depends on SciPy and PyWavelets.) Of
recordings, all of which differ by noise, only copies are duplicates.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_fl import modalities
from edge_fl.errors import ArtefactError, DataError
from edge_fl.failures import Failure
from edge_fl.files import atomic
from edge_fl.files.disk import locked, reporting, require_space
from edge_fl.files.paths import is_utf8, text
from edge_fl.files.shared import make_folder, open_private
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import ABOUT, UnusableFileError
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.config import MB, CaptureConfig

SIDE = 8
MAX_DIFFERENT_BITS = 1
GRID = InputSpec((1, SIDE, SIDE + 1), resize="stretch")
INDEX = "index.jsonl"
STARTS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n": ".png"}
RECORDINGS = {b"RIFF": ".wav", b"fLaC": ".flac", b"PK\3\4": ".npz", b"PAR1": ".parquet", b"": ".csv"}
"""Suffixes by how files begin."""
SUFFIXES = frozenset({*STARTS.values(), *RECORDINGS.values()})
REMEMBERED = 5000
SLACK = 0.05
SPARE_BYTES = 64 * MB
"""Free space that is left on the disk for releases, heads and reports."""
JPEG_QUALITY = 90
TICK_NS = 100_000_000
"""Changes of a folder within this time of each other may have the same time."""

Why = Literal["", "unusable", "duplicate", "too soon", "too large", "paused", "disk full", "not writable"]
Order = Callable[[Sequence[str]], Sequence[str]]
"""Sorts names of files, the most informative first."""


def difference_hash(picture: bytes) -> str:
    """Return the hash of a picture file, 64 bits as hexadecimal digits. Raises UnusableFileError if it cannot be decoded."""
    from edge_fl.modalities import pictures  # here, as below: other devices need no Pillow

    bits, _ = pictures.bits_used(BytesIO(picture))  # which of two levels is higher does not depend on them
    grey = pictures.decode(BytesIO(picture), GRID, bits=max(8, bits) if bits else 0)[0].astype(np.int16)
    return np.packbits(np.diff(grey, axis=1) > 0).tobytes().hex()


def is_near_duplicate(hash: str, known: Iterable[int]) -> bool:
    """Whether at most MAX_DIFFERENT_BITS bits differ from one of the `known` hashes, which are numbers."""
    bits = int(hash, 16)
    return any((bits ^ each).bit_count() <= MAX_DIFFERENT_BITS for each in known)


class Captured(NamedTuple):
    """A file, where it comes from, and what it holds, if the source says it."""

    content: bytes
    source: str
    kind: Kind | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """The name of a picture that was added; or "" and why it was not. retry_s: in how many seconds it can be added, if it came too soon."""

    name: str
    why: Why = ""
    detail: str = ""
    retry_s: int = 0


class PoolEntry(Struct, frozen=True):
    """A line of the index; `time` in seconds since 1970."""

    name: str
    source: str
    time: float
    hash: str


class Pool:
    """Files in `folder`, within the limits of `config`, for a release that takes `input`; pictures before the first release.

    `order` decides what a full pool drops: its last files. By default it sorts by name, which is random: an even sample of all
    files that were ever added.
    """

    input: InputSpec | None = None

    def __init__(
        self,
        folder: Path,
        config: CaptureConfig,
        order: Order = sorted,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.order = folder, order
        self._config, self._clock = config, clock
        self._listing, self._lines = _Listing(), _Lines()

    def add(self, content: bytes, source: str, kind: Kind | None = None) -> Added:
        """Add a file unless it is a near duplicate of an earlier one, or comes too soon after the last one of its source.

        kind: of its samples, before the first release. Pictures in other formats than JPEG and PNG are converted to JPEG, grey ones of 16
        bits to PNG. On a full disk the pool stays as it is.
        """
        kind = self.input.kind if self.input else kind or "picture"
        try:
            if kind == "picture":
                hash = difference_hash(content)
                content, suffix = _storable(content)
            else:
                modalities.of(kind).read(BytesIO(content), self.input)
                hash = hashlib.blake2b(content, digest_size=8).hexdigest()
                suffix = next(suffix for start, suffix in RECORDINGS.items() if content.startswith(start))
        except UnusableFileError as error:
            return Added("", "unusable", error.words)
        if len(content) > self._config.max_bytes:
            return Added("", "too large", f"{len(content) / MB:.1f} MB, at most {self._config.max_mb:g}")
        name = hashlib.sha256(content).hexdigest()[:16] + suffix
        entry = PoolEntry(name, source, self._clock(), hash)
        try:
            with reporting(text(self.folder)):
                return self._add(entry, content)
        except ArtefactError as error:
            return Added("", "disk full" if error.why == Failure.ENOSPC else "not writable", error.message)

    def names(self) -> list[str]:
        """Return the names of all files of the kind that the release takes, sorted."""
        suffixes = ABOUT[self.input.kind].suffixes if self.input else SUFFIXES
        return sorted(name for name in self._sizes() if Path(name).suffix in suffixes)

    def path(self, name: str) -> Path:
        """Return the file of a picture. Raises DataError if it is not in the pool."""
        path = self.folder / name
        if not _is_name(name) or path.is_symlink() or not path.is_file():
            raise DataError(f"{name}: not among the files without labels; it was labelled or dropped")
        return path

    def remove(self, name: str) -> None:
        """Delete a picture; near duplicates of it stay rejected. Raises DataError if it is not in the pool."""
        with locked(self.folder):
            self.path(name).unlink()

    def restore(self, name: str, picture: bytes) -> None:
        """Put a removed picture back under its name. Raises ArtefactError if it cannot be written."""
        with locked(self.folder):
            atomic.write(self.folder / Path(name).name, picture, private=True)

    def entries(self) -> dict[str, PoolEntry]:
        """Return source and time of the pictures by name, in the order in which they were added."""
        present = self._sizes()
        return {entry.name: entry for entry in self._index() if entry.name in present}

    def entry(self, name: str) -> PoolEntry | None:
        """Return source and time of a picture; None if the index does not have it."""
        self._index()
        return self._lines.by_name.get(name)

    def too_small_disk(self) -> str:
        """Return a remark if the limits are more than the disk can hold; "" otherwise."""
        with suppress(OSError):
            make_folder(self.folder, 0o700)
            room = shutil.disk_usage(self.folder).free - SPARE_BYTES + self.size_bytes
            if room < self._config.max_bytes:
                return (
                    f"capture: max_mb = {self._config.max_mb:g}, but the disk has room for {max(room, 0) // MB} MB of pictures;"
                    " when that is used, no more are added"
                )
        return ""

    @property
    def size_bytes(self) -> int:
        """Total size of the pictures."""
        return sum(self._sizes().values())

    def _add(self, entry: PoolEntry, content: bytes) -> Added:
        while not (why := self._rejection(entry)):
            dropped = self._least_informative(len(content))  # not locked: it may take seconds
            with locked(self.folder):
                if why := self._rejection(entry):
                    break
                going = set(dropped)
                sizes = [size for name, size in self._sizes().items() if name not in going]
                if self._fits(len(sizes), sum(sizes), len(content)):
                    self._write(entry, content)  # first: on a full disk no picture is dropped for nothing
                    for name in dropped:
                        (self.folder / name).unlink(missing_ok=True)
                    return Added(entry.name)
        return self._too_soon(entry) if why == "too soon" else Added("", why)

    def _too_soon(self, entry: PoolEntry) -> Added:
        wait_s = max(1, math.ceil(self._config.every_s - min(self._passed_s(entry), default=0.0)))
        every = f"at most one picture of {entry.source!r} in {self._config.every_s:g} s"
        return Added("", "too soon", f"{every}; try again in {wait_s} s", wait_s)

    def _passed_s(self, entry: PoolEntry) -> list[float]:
        """The seconds since each picture of the same source that is recent enough to delay this one."""
        since = (entry.time - each.time for each in self._index() if each.source == entry.source)
        return [passed_s for passed_s in since if 0 <= passed_s < self._config.every_s]

    def _rejection(self, entry: PoolEntry) -> Why:
        self._index()
        if (self.folder / entry.name).exists() or is_near_duplicate(entry.hash, self._lines.hashes):
            return "duplicate"
        return "too soon" if self._passed_s(entry) else ""

    def _least_informative(self, needed_bytes: int) -> list[str]:
        """Return the names to drop so that one more picture fits: a share of SLACK at once, because an order takes time."""
        sizes = self._sizes()
        count, total_bytes = len(sizes), sum(sizes.values())
        if self._fits(count, total_bytes, needed_bytes):
            return []
        dropped: list[str] = []
        for name in reversed(self.order(sorted(sizes))):
            if self._fits(count, total_bytes, needed_bytes, 1 - SLACK):
                break
            dropped.append(name)
            count, total_bytes = count - 1, total_bytes - sizes[name]
        return dropped

    def _fits(self, count: int, total_bytes: int, needed_bytes: int, share: float = 1.0) -> bool:
        """Whether one more picture fits into a share of the limits, next to `count` others of `total_bytes`."""
        most, most_bytes = share * self._config.max_pictures, share * self._config.max_bytes
        return count < most and total_bytes + needed_bytes <= most_bytes

    def _write(self, entry: PoolEntry, content: bytes) -> None:
        require_space(self.folder, len(content) + SPARE_BYTES, entry.name)
        path = self.folder / entry.name
        atomic.write(path, content, private=True)
        try:
            self._append(entry)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _append(self, entry: PoolEntry) -> None:
        """Add a line to the index; every REMEMBERED lines it is written anew, without the oldest pictures that are gone."""
        known, present = self._index(), self._sizes()
        line = msgspec.json.encode(entry)
        if len(known) < len(present) + 2 * REMEMBERED:
            with os.fdopen(open_private(self.folder / INDEX, os.O_WRONLY | os.O_APPEND), "ab") as file:
                file.write(b"\n" + line)  # after whatever an interrupted write has left
            return
        old = [each for each in known[:-REMEMBERED] if each.name in present]
        lines = [msgspec.json.encode(each) for each in (*old, *known[-REMEMBERED:])]
        atomic.write(self.folder / INDEX, b"\n".join([*lines, line]), private=True)

    def _index(self) -> list[PoolEntry]:
        with suppress(FileNotFoundError):
            self._lines = self._lines.read(self.folder / INDEX)
            return self._lines.entries
        self._lines = _Lines()
        return []

    def _sizes(self) -> Mapping[str, int]:
        """Return the sizes of all pictures by name."""
        with suppress(FileNotFoundError):
            self._listing = self._listing.read(self.folder)
            return self._listing.sizes
        return {}  # no picture was added yet


@dataclass(frozen=True)
class _Listing:
    """Sizes of the pictures in a folder by name, from one look at it, which began at `began_ns`; `changed_ns` is the folder's time."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    changed_ns: int = -1
    began_ns: int = 0

    def read(self, folder: Path) -> _Listing:
        """Return a current listing: this one unless the folder has changed; then only new names are looked up. Raises FileNotFoundError."""
        began_ns, changed_ns = time.time_ns(), folder.stat().st_mtime_ns
        if changed_ns == self.changed_ns and self.began_ns - changed_ns > TICK_NS:
            return self
        sizes = {}
        with os.scandir(folder) as files:
            for file in files:
                # a link would show another file on the label page
                if _is_name(file.name) and file.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # removed by another process
                        known = self.sizes.get(file.name)
                        sizes[file.name] = file.stat().st_size if known is None else known
        return _Listing(sizes, changed_ns, began_ns)


@dataclass(frozen=True)
class _Lines:
    """The entries of an index file, up to `end` bytes, with the hashes as numbers."""

    inode: int = 0
    end: int = 0
    entries: list[PoolEntry] = field(default_factory=list)
    by_name: dict[str, PoolEntry] = field(default_factory=dict)
    hashes: list[int] = field(default_factory=list)

    def read(self, file: Path) -> _Lines:
        """Return all entries: those known, and those of the lines that were added since. Raises FileNotFoundError."""
        with file.open("rb") as lines:
            stat = os.fstat(lines.fileno())
            if (stat.st_ino, stat.st_size) == (self.inode, self.end):
                return self
            is_longer = stat.st_ino == self.inode and stat.st_size > self.end
            lines.seek(start := self.end if is_longer else 0)
            added = lines.read()
        new = [entry for line in added.split(b"\n") if (entry := _entry(line))]
        last = added[added.rfind(b"\n") + 1 :]
        unfinished = 0 if _entry(last) else len(last)  # another process may be writing it
        entries, hashes = (self.entries, self.hashes) if is_longer else ([], [])
        by_name = {entry.name: entry for entry in new}
        return _Lines(
            stat.st_ino,
            start + len(added) - unfinished,
            entries + new,
            self.by_name | by_name if is_longer else by_name,
            hashes + [int(entry.hash, 16) for entry in new],
        )


def jpeg(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels, grey [H, W] or RGB [H, W, 3]."""
    from edge_fl.modalities import pictures

    return pictures.jpeg(pixels, JPEG_QUALITY)


def _storable(picture: bytes) -> tuple[bytes, str]:
    """Return the content and suffix of the file to store. Raises UnusableFileError."""
    for start, suffix in STARTS.items():
        if picture.startswith(start):
            return picture, suffix
    from edge_fl.modalities import pictures

    bits, colour = pictures.bits_used(BytesIO(picture))
    if bits and not colour:  # a JPEG has 8 bits, and which of them to keep is the learner's to know
        return pictures.grey_png(BytesIO(picture)), ".png"
    pixels = pictures.decode(BytesIO(picture), None)
    return jpeg(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)), ".jpg"


def _is_name(name: str) -> bool:
    """Whether this can be a picture of the pool; a page could not name one that is no text."""
    return Path(name).suffix in SUFFIXES and not name.startswith(".") and "/" not in name and is_utf8(name)


def _entry(line: bytes) -> PoolEntry | None:
    """Decode a line of the index; None for a damaged one."""
    try:
        entry = msgspec.json.decode(line, type=PoolEntry)
        int(entry.hash, 16)
    except (ValueError, *NOT_JSON):
        return None
    return entry
