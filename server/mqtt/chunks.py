"""Publish the chunks of a blob as retained messages, and clear them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edge_fl.wire.blob import Blob, split
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import UNTYPED, Packet, Transport


@dataclass(frozen=True)
class ChunkLimits:
    """How much may be on its way to the broker at once, and how long the broker may take to accept that."""

    outstanding_bytes: int = 4 * 1024 * 1024
    drain_s: float = 120.0


LIMITS = ChunkLimits()


def send_chunks(
    transport: Transport,
    topics: Topics,
    blob: Blob,
    payload: bytes,
    expiry_s: int | None = None,
    *,
    only: Iterable[int] | None = None,
    limits: ChunkLimits = LIMITS,
    taken: Callable[[int], None] = lambda bytes: None,
) -> None:
    """Retains the chunks of one blob (or `only` these); `taken` hears of bytes that the broker has taken, the last ones apart.

    Raises DeadlineError when the broker does not keep up.
    """
    chunks = split(payload, blob.chunk_bytes)
    outstanding_bytes = 0
    for index in range(len(chunks)) if only is None else only:
        topic = topics.chunk(blob.sha256, index)
        transport.publish(Packet(topic, bytes(chunks[index]), True, 1, UNTYPED, expiry_s))
        outstanding_bytes += len(chunks[index])
        if outstanding_bytes >= limits.outstanding_bytes:
            transport.drain(limits.drain_s)
            taken(outstanding_bytes)
            outstanding_bytes = 0


def clear_chunks(transport: Transport, topics: Topics, blob: Blob) -> None:
    """Makes the broker forget the chunks of one blob."""
    for index in range(len(blob.chunks)):
        transport.publish(Packet(topics.chunk(blob.sha256, index), b"", retain=True, content_type=UNTYPED))
