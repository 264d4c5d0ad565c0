"""A file of rows, each with its length and checksum, to which rows are appended in steps; a process that is killed loses no earlier step.

The first damaged row ends the file: the next step overwrites what a power cut or a full disk left incomplete.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from edge_fl.files import atomic
from edge_fl.files.shared import make_folder, open_private

FRAME = struct.Struct("<II")  # length and CRC-32 of a row


class RowFile:
    """The rows in `path`, in a folder for its owner alone."""

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0

    def read(self) -> Iterator[bytes]:
        """Yield the rows from the first, and mark the file as used. A row at which the caller stops counts as damaged."""
        self._end = 0
        with suppress(OSError, struct.error):
            content = self.path.read_bytes()
            os.utime(self.path)
            while self._end < len(content):
                length, checksum = FRAME.unpack_from(content, self._end)
                start = self._end + FRAME.size
                row = content[start : start + length]
                if len(row) < length or zlib.crc32(row) != checksum:
                    return
                yield row
                self._end = start + length

    def append(self, rows: Iterable[bytes]) -> None:
        """Add rows to those that were read or written, on the disk when this returns. Raises OSError."""
        make_folder(self.path.parent, 0o700)
        with os.fdopen(open_private(self.path, os.O_RDWR), "r+b") as file:
            file.truncate(self._end)
            file.seek(self._end)
            file.write(b"".join(map(_framed, rows)))
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()

    def replace(self, rows: Iterable[bytes]) -> None:
        """Write the file anew, atomically. Raises OSError."""
        make_folder(self.path.parent, 0o700)
        content = b"".join(map(_framed, rows))
        atomic.write(self.path, content, private=True)
        self._end = len(content)

    def evict(self, most: int) -> None:
        """Delete the files like this one in its folder, but for this one and the `most` - 1 others that were used last."""
        with suppress(OSError):
            files = sorted(
                self.path.parent.glob(f"*{self.path.suffix}"), key=lambda path: path.stat().st_mtime_ns
            )
            for old in [path for path in files if path != self.path][: 1 - most]:
                old.unlink(missing_ok=True)


def _framed(row: bytes) -> bytes:
    return FRAME.pack(len(row), zlib.crc32(row)) + row
