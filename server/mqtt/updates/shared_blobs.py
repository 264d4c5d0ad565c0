"""What travels down in an exchange, retained as chunks on the broker until its answers count no longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge_fl.learn.tree import Parts, to_arrays
from edge_fl.wire import tensors
from edge_fl.wire.blob import Blob, describe
from server.mqtt.chunks import clear_chunks, send_chunks
from server.mqtt.connection import ServerConnection


class SharedBlobs:
    """What travels down in one exchange: one blob for all clients that receive the same, sent once and kept until the end."""

    def __init__(self, connection: ServerConnection, expiry_s: float) -> None:
        self._connection, self._expiry_s = connection, expiry_s
        self._packed: dict[frozenset[tuple[str, str, int]], tuple[Parts, Blob]] = {}
        self._payloads: dict[str, tuple[Blob, bytes]] = {}

    def send(self, parts: Parts) -> Blob | None:
        """The descriptor of `parts`, whose chunks are now retained; None when there is nothing to send."""
        if not parts:
            return None
        # Clients of one round mostly receive the same tensors: pack and hash them once. The parts are kept so that ids stay theirs.
        key = frozenset(
            (part, name, id(t)) for part, params in parts.items() for name, t in [("", None), *params.items()]
        )
        if key not in self._packed:
            payload = tensors.pack(to_arrays(parts))
            blob = describe(payload)
            self._packed[key] = parts, blob
            if blob.sha256 not in self._payloads:
                self._payloads[blob.sha256] = blob, payload
                self.send_again(blob.sha256)
        return self._packed[key][1]

    def send_again(self, sha256: str, only: Sequence[int] | None = None) -> None:
        """Retains the chunks of one blob anew, or `only` these; does nothing for a blob that is not ours."""
        if (known := self._payloads.get(sha256)) and (transport := self._connection.transport):
            blob, payload = known
            chunks = None if only is None else [index for index in only if index < len(blob.chunks)]
            send_chunks(
                transport,
                self._connection.topics,
                blob,
                payload,
                max(1, round(self._expiry_s)),
                only=chunks,
            )

    def send_all_again(self) -> None:
        """Retains everything anew, for a broker that has forgotten it."""
        for sha256 in list(self._payloads):
            self.send_again(sha256)

    def clear(self, others: Iterable[SharedBlobs] = ()) -> None:
        """Nothing of it stays retained but what belongs to `others` too."""
        kept = {sha256 for other in others for sha256 in other._payloads}
        for sha256, (blob, _) in self._payloads.items():
            if sha256 not in kept and (transport := self._connection.transport):
                clear_chunks(transport, self._connection.topics, blob)
        self._payloads, self._packed = {}, {}
