"""Where a device's data are, and whether they have changed: all that the agent itself needs to know; its children read them."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import DataError, nearest
from edge_fl.files.folder import walk
from edge_fl.files.paths import raw
from edge_fl_devices.config import SINGLE_FILES

KINDS = ("folder", "npz", "python", "table")


def parsed(source: str) -> tuple[str, str]:
    """Return kind and location of a source. Raises DataError."""
    kind, _, location = source.partition(":")
    if location and kind in KINDS:
        return kind, location
    suffix = source[-4:]
    if suffix in SINGLE_FILES or Path(source).is_dir():
        return SINGLE_FILES.get(suffix, "folder"), source
    raise DataError(
        f"data source {source!r}: expected a folder, an .npz, a .csv, or KIND:LOCATION{nearest(kind, KINDS)}"
    )


@dataclass(frozen=True)
class Snapshot:
    """The files of a source at one time, by their digests; those of a function are unknown (None)."""

    files: frozenset[bytes] | None = None

    @property
    def stamp(self) -> str:
        """A value that is another one when a file was added, changed or removed; "" of a function."""
        if self.files is None:
            return ""
        return digest(b"".join(sorted(self.files))).hex()


def snapshot(source: str) -> Snapshot:
    """List the files of a folder, or the single file; opens none. Raises DataError."""
    kind, location = parsed(source)
    if kind == "python":
        return Snapshot()
    root = Path(location)
    digests = set()
    for path in walk(root).files if kind == "folder" else [root]:
        with suppress(OSError):
            digests.add(file_digest(path, path.stat()))
    return Snapshot(frozenset(digests))


def file_key(stat: os.stat_result) -> bytes:
    """Return 16 bytes that stay when a file moves, and are others when its content changes, as far as inode, size and time tell."""
    identity = f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}".encode()
    return digest(identity)


def file_digest(path: Path, stat: os.stat_result) -> bytes:
    """Return 16 bytes that are others when the file changes: its content, as far as size and time tell, its name, or who may read it."""
    state = b"\0%d %d %d" % (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return digest(raw(path) + state)


def digest(content: bytes) -> bytes:
    """Return a hash of 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()
