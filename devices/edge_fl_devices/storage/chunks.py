"""Verified chunks on disk, so that an interrupted download resumes and no bad chunk is ever stored.

Each blob grows in one file, every chunk at its offset, and that file becomes the installed one: fetched data are written once, which
spares an SD card. Chunks are verified before they are written and once more when a new process first reads them, because a power cut
may have come before the disk stored them. Hence no fsync per chunk, which would take an SD card longer than the download.
"""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.files.shared import make_folder, open_private


class Chunks:
    """The chunks of blobs that are not installed yet, one file SHA256 per blob. One process at a time writes here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._verified: dict[str, set[int]] = {}

    def missing(self, blob: Blob) -> list[int]:
        verified = self._verified_chunks(blob)
        return [index for index in range(len(blob.chunks)) if index not in verified]

    def add(self, blob: Blob, index: int, payload: bytes) -> bool:
        """Verify and store one chunk; return whether the blob is complete. Raises ArtefactError ("chunk_hash", "enospc")."""
        verified = self._verified_chunks(blob)
        if index not in verified:
            try:
                blob.check_chunk(index, payload)
            except ArtefactError as error:
                raise ArtefactError(error.message, Failure.CHUNK_HASH) from error
            self._write(blob, index, payload)
            verified.add(index)
        return len(verified) == len(blob.chunks)

    def copy_common(self, blob: Blob, path: Path, source: Blob) -> None:
        """Copy the missing chunks of `blob` that the file `path`, described by `source`, contains too."""
        positions = {sha256: index for index, sha256 in enumerate(source.chunks)}
        common = [index for index in self.missing(blob) if blob.chunks[index] in positions]
        if not common:
            return
        with path.open("rb") as file:
            for index in common:
                file.seek(positions[blob.chunks[index]] * source.chunk_bytes)
                try:
                    self.add(blob, index, file.read(source.chunk_bytes))
                except ArtefactError as error:
                    if (
                        error.why != Failure.CHUNK_HASH
                    ):  # a corrupt chunk of the installed file is fetched instead
                        raise

    def assemble(self, blob: Blob, path: Path) -> None:
        """Move the complete blob to `path`, atomically. Raises ArtefactError ("chunk_hash", ...)."""
        with reporting(path.name), self._path(blob).open("rb") as file, ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(os.fsync, file.fileno())  # in parallel with the hash
            if (actual := hashlib.file_digest(file, "sha256").hexdigest()) != blob.sha256:
                self._verified.pop(blob.sha256)  # the next read finds the corrupt chunk
                raise ArtefactError(
                    f"{text(path.name)}: sha256 {actual[:8]}, manifest says {blob.sha256[:8]}",
                    Failure.CHUNK_HASH,
                    consequence="not installed",
                )
            flushed.result()
            atomic.link(self._path(blob), path)

    def keep_only(self, sha256s: set[str]) -> None:
        """Delete the chunks of all other blobs and leftovers of interrupted writes."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name not in sha256s:
                path.unlink(missing_ok=True)
        self._verified = {sha256: held for sha256, held in self._verified.items() if sha256 in sha256s}

    def _path(self, blob: Blob) -> Path:
        return self.folder / blob.sha256

    def _verified_chunks(self, blob: Blob) -> set[int]:
        """Indices of the good chunks on disk; a file without any is deleted."""
        if blob.sha256 not in self._verified:
            self._verified[blob.sha256] = good = self._read_verified(blob)
            if not good:
                self._path(blob).unlink(missing_ok=True)
        return self._verified[blob.sha256]

    def _read_verified(self, blob: Blob) -> set[int]:
        good: set[int] = set()
        with suppress(OSError), self._path(blob).open("rb") as file:
            if os.fstat(file.fileno()).st_size > blob.bytes:
                return good  # not a file of this blob
            for index in range(len(blob.chunks)):
                with suppress(ArtefactError):
                    blob.check_chunk(index, file.read(blob.chunk_bytes))
                    good.add(index)
        return good

    def _write(self, blob: Blob, index: int, payload: bytes) -> None:
        path, first = self._path(blob), not self._verified[blob.sha256]
        try:
            with reporting(f"chunk {index} of {text(path.name[:8])}"):
                if first:
                    make_folder(self.folder)
                _write_at(path, index * blob.chunk_bytes, payload)
        except ArtefactError:
            if first:
                path.unlink(missing_ok=True)
            raise


@dataclass(frozen=True, slots=True)
class ChunkSink:
    """Destination of one blob's chunks on disk."""

    chunks: Chunks
    blob: Blob

    @property
    def missing(self) -> list[int]:
        return self.chunks.missing(self.blob)

    def add(self, index: int, payload: bytes) -> bool:
        return self.chunks.add(self.blob, index, payload)


def _write_at(path: Path, offset: int, payload: bytes) -> None:
    """Write into a file, which is created if absent. Raises OSError, also if the disk takes only a part."""
    descriptor = open_private(path, os.O_WRONLY)
    try:
        if os.pwrite(descriptor, payload, offset) < len(payload):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
    finally:
        os.close(descriptor)
