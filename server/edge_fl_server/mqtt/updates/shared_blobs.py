"""The broadcasts of a round request, retained as chunks on the broker until the request is closed."""

from collections.abc import Iterable, Sequence

from edge_fl.blob import Blob, describe
from edge_fl.learn.tree import Parts, to_arrays
from edge_fl.wire import tensors
from edge_fl_server.mqtt.chunks import clear_chunks, numbered, send_chunks
from edge_fl_server.mqtt.connection import ServerConnection


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
