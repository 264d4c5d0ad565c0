"""Verified chunks on disk, so that a download which is killed goes on where it was and a bad chunk never gets in.

Each blob grows in one file of its own, every chunk at its place, and that file becomes the installed one: what is fetched is written once,
which matters to a card. A chunk is checked before it is written and, because a power cut may have come before the disk took it, once more
when a new process first looks. So none is forced to the disk one by one, which takes a card longer than fetching it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from edge_fl.errors import ArtefactError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.wire.blob import Blob


class Chunks:
    """The chunks of blobs not yet installed, in one file SHA256 for each blob. One process at a time writes here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, set[int]] = {}

    def missing(self, blob: Blob) -> list[int]:
        """Indices still to come, ascending."""
        held = self._verified(blob)
        return [index for index in range(len(blob.chunks)) if index not in held]

    def add(self, blob: Blob, index: int, payload: bytes) -> bool:
        """Verifies one chunk and keeps it; True once the blob is complete. Raises ArtefactError ("chunk_hash", "enospc")."""
        held = self._verified(blob)
        if index not in held:
            try:
                blob.check_chunk(index, payload)
            except ArtefactError as error:
                raise ArtefactError(str(error), "chunk_hash") from error
            self._write(blob, index, payload)
            held.add(index)
        return len(held) == len(blob.chunks)

    def take_over(self, blob: Blob, path: Path, source: Blob) -> None:
        """Copies the chunks of `blob` that the file `path`, described by `source`, has as well: they need not be fetched."""
        places = {sha256: index for index, sha256 in enumerate(source.chunks)}
        common = [index for index in self.missing(blob) if blob.chunks[index] in places]
        if not common:
            return
        with path.open("rb") as file:
            for index in common:
                file.seek(places[blob.chunks[index]] * source.chunk_bytes)
                self._take_over_one(blob, index, file.read(source.chunk_bytes))

    def assemble(self, blob: Blob, path: Path) -> None:
        """Puts the blob at `path`, whole or not at all. Raises ArtefactError ("incomplete", "chunk_hash", ...)."""
        if missing := self.missing(blob):
            raise ArtefactError(
                f"{path.name}: {len(missing)} of {len(blob.chunks)} chunks missing, the first is {missing[0]}",
                "incomplete",
                consequence="not installed",
            )
        with reporting(path.name), self._path(blob).open("rb") as file, ThreadPoolExecutor(1) as aside:
            flushed = aside.submit(
                os.fsync, file.fileno()
            )  # the disk and the hash take their time side by side
            if (found := hashlib.file_digest(file, "sha256").hexdigest()) != blob.sha256:
                self._held.pop(blob.sha256)  # the next look at the disk finds which chunk went bad
                raise ArtefactError(
                    f"{path.name}: sha256 {found[:8]}, manifest says {blob.sha256[:8]}",
                    "chunk_hash",
                    consequence="not installed",
                )
            flushed.result()
            atomic.link(self._path(blob), path)

    def keep_only(self, sha256s: set[str]) -> None:
        """Removes the chunks of every other blob, and leftovers of interrupted writes."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name not in sha256s:
                path.unlink(missing_ok=True)
        self._held = {sha256: held for sha256, held in self._held.items() if sha256 in sha256s}

    def _path(self, blob: Blob) -> Path:
        return self.folder / blob.sha256

    def _verified(self, blob: Blob) -> set[int]:
        """Indices of the good chunks on disk; a file without any is removed."""
        if blob.sha256 not in self._held:
            self._held[blob.sha256] = held = self._good(blob)
            if not held:
                self._path(blob).unlink(missing_ok=True)
        return self._held[blob.sha256]

    def _good(self, blob: Blob) -> set[int]:
        good: set[int] = set()
        with suppress(OSError), self._path(blob).open("rb") as file:
            if os.fstat(file.fileno()).st_size > blob.bytes:
                return good  # longer than what is fetched: something else
            for index in range(len(blob.chunks)):
                with suppress(ArtefactError):
                    blob.check_chunk(index, file.read(blob.chunk_bytes))
                    good.add(index)
        return good

    def _take_over_one(self, blob: Blob, index: int, payload: bytes) -> None:
        try:
            self.add(blob, index, payload)
        except ArtefactError as error:
            if error.why != "chunk_hash":  # the installed file has gone bad there: fetch this chunk
                raise

    def _write(self, blob: Blob, index: int, payload: bytes) -> None:
        path = self._path(blob)
        try:
            with reporting(f"chunk {index} of {path.name[:8]}"):
                if not self._held[blob.sha256]:
                    self.folder.mkdir(parents=True, exist_ok=True)
                _write_at(path, index * blob.chunk_bytes, payload)
        except ArtefactError:
            if not self._held[blob.sha256]:
                path.unlink(missing_ok=True)
            raise


def _write_at(path: Path, offset: int, payload: bytes) -> None:
    """Into a file that may be there or not. Raises OSError, also when the disk takes only a part."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        if os.pwrite(descriptor, payload, offset) < len(payload):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
