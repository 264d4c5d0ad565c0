"""Publish the chunks of a blob as retained messages, and clear them again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edge_fl.blob import Blob, split
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import UNTYPED, Packet, Transport


@dataclass(frozen=True)
class ChunkLimits:
    """Bytes published before waiting for the broker's acknowledgements, and the time limit of that wait."""

    outstanding_bytes: int = 4 * 1024 * 1024
    drain_s: float = 120.0


LIMITS = ChunkLimits()


def numbered(blob: Blob, payload: bytes, only: Iterable[int] | None = None) -> list[tuple[int, memoryview]]:
    """The chunks of a blob (or `only` these) with their indices; unknown indices are ignored."""
    chunks = split(payload, blob.chunk_bytes)
    indices = range(len(chunks)) if only is None else only
    return [(index, chunks[index]) for index in indices if 0 <= index < len(chunks)]


def send_chunks(
    transport: Transport,
    topics: Topics,
    blob: Blob,
    chunks: Iterable[tuple[int, memoryview]],
    *,
    expiry_s: int | None = None,
    limits: ChunkLimits = LIMITS,
    on_sent: Callable[[int], None] = lambda bytes: None,
) -> None:
    """Publish `numbered` chunks of a blob retained; `on_sent` receives the bytes that the broker acknowledged, after each full window.

    Raises DeadlineError if the broker does not keep up.
    """
    outstanding_bytes = 0
    for index, chunk in chunks:
        topic = topics.chunk(blob.sha256, index)
        transport.publish(Packet(topic, bytes(chunk), True, 1, UNTYPED, expiry_s))
        outstanding_bytes += len(chunk)
        if outstanding_bytes >= limits.outstanding_bytes:
            transport.drain(limits.drain_s)
            on_sent(outstanding_bytes)
            outstanding_bytes = 0


def clear_chunks(transport: Transport, topics: Topics, blob: Blob) -> None:
    """Clear the retained chunks of a blob."""
    for index in range(len(blob.chunks)):
        transport.publish(Packet(topics.chunk(blob.sha256, index), b"", retain=True, content_type=UNTYPED))
