"""What one device fetches at a time: one blob, when it is the device's turn, and the signed metadata at once; broadcasts stay in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping

from edge_fl.blob import Assembly, Blob
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.wire.messages import Assignment
from edge_fl.wire.topics import Address, Topics
from edge_fl_devices.agent.effects import Effect
from edge_fl_devices.agent.events import Failed, Fetched
from edge_fl_devices.install.fetch import Download, FetchLimits, MetadataFetch, Sink

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


class Fetching:
    """The fetches of one device. All but `carry_out` run on one thread.

    request_turn: asks for a call of `begin`; end_turn: ends it, once for every request. carry_out: subscribes and publishes.
    fetched: takes the outcome of a blob. looked_up: takes the number of a release (0: none) and the outcome of a fetch of the signed
    metadata for it.
    """

    def __init__(
        self,
        device: str,
        topics: Topics,
        limits: FetchLimits,
        request_turn: Callable[[], None],
        end_turn: Callable[[], None],
        carry_out: Callable[[Iterable[Effect]], None],
        fetched: Callable[[Fetched | Failed], None],
        looked_up: Callable[[int, dict[str, bytes] | Failed], None],
    ) -> None:
        self.download: Download | None = None
        self.metadata: MetadataFetch | None = None
        self._device, self._topics, self._limits = device, topics, limits
        self._request_turn, self._end_turn, self._carry_out = request_turn, end_turn, carry_out
        self._fetched, self._looked_up = fetched, looked_up

    @property
    def wake_s(self) -> float:
        """When the next tick is due."""
        return min((each.wake_s for each in self._all), default=math.inf)

    @property
    def _all(self) -> list[Download | MetadataFetch]:
        return [each for each in (self.download, self.metadata) if each]

    def fetch(self, blob: Blob, sink: Sink) -> None:
        """Fetch the missing chunks of a blob once it is the device's turn."""
        self.download = Download(blob, sink, self._device, self._topics, self._limits)
        self._request_turn()

    def look_up(self, release: int, now_s: float) -> None:
        """Fetch the signed metadata for a release; 0: for the keys that they name."""
        self.metadata = MetadataFetch(release, self._device, self._topics, self._limits)
        self._carry_out(self.metadata.begin(now_s))

    def begin(self, now_s: float) -> None:
        """It is the device's turn; a fetch that was cancelled meanwhile gives it back."""
        if self.download and not self.download.begun:
            self._advance(self.download, self.download.begin(now_s))
        else:
            self._end_turn()

    def cancel(self) -> None:
        """Cancel the fetch of a blob."""
        if self.download:
            self._carry_out(self.download.cancel() if self.download.begun else ())
            self._end_download(self.download)

    def abandon(self) -> None:
        """Give the turn back after the connection was cut for good."""
        if self.download and self.download.begun:
            self._end_turn()

    def resume(self, now_s: float) -> None:
        """Subscribe again after a reconnect."""
        for each in self._all:
            self._carry_out(each.begin(now_s) if each.begun else ())

    def pause(self) -> bool:
        """Wait for the next connection; end the look-up of a release, so that the device is free, and return whether there was one."""
        interrupted = self.metadata is not None and self.metadata.release > 0
        if interrupted:
            self.metadata = None
        for each in self._all:
            each.pause()
        return interrupted

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        if self.download:
            self._advance(self.download, self.download.tick(now_s))
        if self.metadata:
            self._advance_metadata(self.metadata, self.metadata.tick(now_s))

    def received(self, address: Address, payload: bytes, now_s: float) -> None:
        """Take a message, of whatever fetch."""
        if self.download:
            self._advance(self.download, self.download.received(address, payload, now_s))
        if self.metadata:
            self._advance_metadata(self.metadata, self.metadata.received(address, payload, now_s))

    def _advance(self, download: Download, requested: Iterable[Effect]) -> None:
        self._carry_out(requested)
        if download.outcome:
            self._end_download(download)
            self._fetched(download.outcome)

    def _end_download(self, download: Download) -> None:
        self.download = None
        if download.begun:
            self._end_turn()

    def _advance_metadata(self, fetch: MetadataFetch, requested: Iterable[Effect]) -> None:
        self._carry_out(requested)
        if fetch.outcome is not None:
            self.metadata = None
            self._looked_up(fetch.release, fetch.outcome)
