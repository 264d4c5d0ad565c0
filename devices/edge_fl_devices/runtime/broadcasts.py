"""The broadcasts that a device has fetched: the newest stay in memory for the next assignment if they are small."""

import logging
from collections.abc import Mapping

from edge_fl.blob import Assembly, Blob
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.wire.messages import Assignment
from edge_fl_devices.agent.events import Failed, Fetched

log = logging.getLogger(__name__)

RECENT, RECENT_BYTES = 2, 64 * 1024 * 1024
"""How many broadcasts stay in memory between assignments, and their size: a device of the panel has one of its two
models already, and the other is usually the next broadcast."""


class ReceivedBroadcasts:
    """The whole broadcasts by hash, and the incomplete one: a failed fetch continues where it stopped."""

    def __init__(self) -> None:
        self._whole: dict[str, bytes] = {}  # oldest first
        self._incomplete: Assembly | None = None

    def __contains__(self, blob: Blob) -> bool:
        return blob.sha256 in self._whole

    def sink(self, blob: Blob) -> Assembly:
        """Return the destination of a broadcast's chunks."""
        if self._incomplete is None or self._incomplete.blob != blob:
            self._incomplete = Assembly(blob)
        return self._incomplete

    def joined(self, outcome: Fetched | Failed) -> Fetched | Failed:
        """Put a complete broadcast together; return the outcome of its fetch."""
        broadcast = self._incomplete
        if broadcast is None or not broadcast.complete:
            return outcome
        self._incomplete = None
        try:
            self._whole[broadcast.blob.sha256] = broadcast.join()
        except ArtefactError as error:  # its chunks are those of the descriptor, but they are not the blob
            log.warning("%s", error)
            return Failed(Failure.BLOB_HASH)
        return outcome

    def take(self, assignment: Assignment) -> Mapping[str, bytes]:
        """Return the fetched broadcasts of an assignment by hash. The newest stay."""
        wanted = [blob.sha256 for blob in (assignment.before, assignment.down) if blob]
        taken = {sha256: self._whole[sha256] for sha256 in wanted}
        kept = {**{sha256: whole for sha256, whole in self._whole.items() if sha256 not in taken}, **taken}
        while len(kept) > RECENT or sum(map(len, kept.values())) > RECENT_BYTES:
            del kept[next(iter(kept))]
        self._whole = kept
        return taken
