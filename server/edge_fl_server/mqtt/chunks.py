"""Blobs as retained chunks on the broker: publish and clear them, and those that a round request broadcasts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edge_fl.blob import Blob, describe, split
from edge_fl.learn.tree import Parts, to_arrays
from edge_fl.wire import tensors
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import UNTYPED, Packet, Transport
from edge_fl_server.mqtt.connection import ServerConnection


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


class SharedBlobs:
    """The blobs of one round request: clients that receive the same parts share a blob, which is sent once."""

    def __init__(self, connection: ServerConnection, expiry_s: float) -> None:
        self._connection, self._expiry_s = connection, expiry_s
        self._packed: dict[frozenset[tuple[str, str, int]], tuple[Parts, Blob]] = {}
        self._payloads: dict[str, tuple[Blob, bytes]] = {}

    def send(self, parts: Parts) -> Blob | None:
        """Publish `parts` as retained chunks -> their descriptor; None without parts."""
        if not parts:
            return None
        # Most clients of a round receive the same tensors: pack and hash them once. The parts are kept so that their ids stay valid.
        key = frozenset(
            (part, name, id(t)) for part, params in parts.items() for name, t in [("", None), *params.items()]
        )
        if key not in self._packed:
            payload = tensors.pack(to_arrays(parts))
            blob = describe(payload)
            self._packed[key] = parts, blob
            if blob.sha256 not in self._payloads:
                self._payloads[blob.sha256] = blob, payload
                self.republish(blob.sha256)
        return self._packed[key][1]

    def republish(self, sha256: str, only: Sequence[int] | None = None) -> None:
        """Publish the chunks of a blob again, or `only` these; ignore unknown blobs."""
        if (known := self._payloads.get(sha256)) and (transport := self._connection.transport):
            blob, payload = known
            chunks = numbered(blob, payload, only)
            expiry_s = max(1, round(self._expiry_s))
            send_chunks(transport, self._connection.topics, blob, chunks, expiry_s=expiry_s)

    def republish_all(self) -> None:
        """Publish all blobs again after the broker lost them."""
        for sha256 in list(self._payloads):
            self.republish(sha256)

    def clear(self, others: "Iterable[SharedBlobs]" = ()) -> None:
        """Clear all chunks except those that `others` use too."""
        kept = {sha256 for other in others for sha256 in other._payloads}
        for sha256, (blob, _) in self._payloads.items():
            if sha256 not in kept and (transport := self._connection.transport):
                clear_chunks(transport, self._connection.topics, blob)
        self._payloads, self._packed = {}, {}
