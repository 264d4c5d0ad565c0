"""Blobs: bytes split into chunks with a hash each, so that a transfer can be resumed and every chunk verified.

Extractors, broadcasts and updates travel as blobs: the descriptor in a message or in signed metadata, the chunks separately.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta, Struct

from edge_fl.errors import ArtefactError

CHUNK_BYTES = 64 * 1024
MIN_CHUNK_BYTES = 1024
MAX_BLOB_BYTES = 512 * 1024 * 1024
Payload = bytes | memoryview
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Blob(Struct, frozen=True, forbid_unknown_fields=True):
    """Descriptor of a blob: sha256 and length of the whole, chunk length, and the sha256 of every chunk in order."""

    sha256: Digest
    bytes: Annotated[int, Meta(ge=1, le=MAX_BLOB_BYTES)]
    chunks: Annotated[list[Digest], Meta(max_length=MAX_BLOB_BYTES // MIN_CHUNK_BYTES)]
    chunk_bytes: Annotated[int, Meta(ge=MIN_CHUNK_BYTES, le=256 * 1024)] = CHUNK_BYTES

    def __post_init__(self) -> None:
        expected = -(-self.bytes // self.chunk_bytes)
        if len(self.chunks) != expected:
            # ValueError: decoding a message or a manifest turns it into its own error with the field's place
            raise ValueError(f"{self.bytes} bytes in {len(self.chunks)} chunks, expected {expected}")

    def check_chunk(self, index: int, payload: Payload) -> None:
        """Raise ArtefactError unless `payload` is chunk `index`."""
        if not 0 <= index < len(self.chunks):
            raise ArtefactError(f"blob {self.sha256[:8]}: unexpected chunk {index} of {len(self.chunks)}")
        expected = min(self.chunk_bytes, self.bytes - index * self.chunk_bytes)
        if len(payload) != expected:
            raise ArtefactError(
                f"blob {self.sha256[:8]} chunk {index}: {len(payload)} bytes, expected {expected}"
            )
        if (found := digest(payload)) != self.chunks[index]:
            raise ArtefactError(
                f"blob {self.sha256[:8]} chunk {index}: sha256 {found[:8]}, expected {self.chunks[index][:8]}"
            )


def digest(payload: Payload) -> str:
    """sha256 in hex."""
    return hashlib.sha256(payload).hexdigest()


def describe(payload: bytes, chunk_bytes: int = CHUNK_BYTES) -> Blob:
    """Describe `payload`. Raises ArtefactError when it is empty or above 512 MiB."""
    if not 0 < len(payload) <= MAX_BLOB_BYTES:
        raise ArtefactError(
            f"blob of {len(payload)} bytes: expected 1 to {MAX_BLOB_BYTES}", consequence="not sent"
        )
    return Blob(
        digest(payload), len(payload), [digest(chunk) for chunk in split(payload, chunk_bytes)], chunk_bytes
    )


def split(payload: bytes, chunk_bytes: int = CHUNK_BYTES) -> list[memoryview]:
    """Views of the chunks in order, without a copy."""
    view = memoryview(payload)
    return [view[start : start + chunk_bytes] for start in range(0, len(payload), chunk_bytes)]


class Assembly:
    """Collect the chunks of one blob in memory, in any order; an invalid chunk is rejected and can be sent again."""

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self._chunks: dict[int, bytes] = {}

    def add(self, index: int, payload: bytes) -> bool:
        """Add one chunk; True once the blob is complete. Raises ArtefactError for an invalid chunk."""
        self.blob.check_chunk(index, payload)
        self._chunks[index] = payload
        return self.complete

    @property
    def complete(self) -> bool:
        return len(self._chunks) == len(self.blob.chunks)

    @property
    def missing(self) -> list[int]:
        """Indices of missing chunks, ascending."""
        return [i for i in range(len(self.blob.chunks)) if i not in self._chunks]

    def join(self) -> bytes:
        """The whole blob. Raises ArtefactError unless it is complete and its sha256 is the descriptor's."""
        whole = b"".join(self._chunks[i] for i in sorted(self._chunks))
        if len(whole) != self.blob.bytes or digest(whole) != self.blob.sha256:
            raise ArtefactError(f"blob {self.blob.sha256[:8]}: {len(whole)} of {self.blob.bytes} bytes match")
        return whole
