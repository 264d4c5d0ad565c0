"""Transfers of agent updates: the downloads of `edge_fl_devices.install.fetch`, in a thread of their own, over the agent's connection."""

import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError, DeadlineError, ProtocolError, StoppedError
from edge_fl.failures import Failure
from edge_fl.wire.messages import Echo, decode
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import Connected, Disconnected, Event, Packet
from edge_fl_devices.agent.effects import Effect
from edge_fl_devices.agent.events import Failed
from edge_fl_devices.install import fetch
from edge_fl_devices.install.fetch import Download, FetchLimits, MetadataFetch, Sink

POLL_S = 0.5


class Transfers:
    """One transfer at a time. `put` receives all events of the connection, in any thread; `carry_out` subscribes and publishes."""

    def __init__(
        self,
        device: str,
        topics: Topics,
        carry_out: Callable[[Iterable[Effect]], None],
        limits: FetchLimits = fetch.LIMITS,
    ) -> None:
        self._device, self._topics, self._limits = device, topics, limits
        self._carry_out = carry_out
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._transfer: Download | MetadataFetch | None = None
        self._closed = False

    def put(self, event: Event) -> None:
        """Take what concerns the transfer under way."""
        if self._transfer:
            self._events.put(event)

    def close(self) -> None:
        """End the transfer under way."""
        self._closed = True

    def metadata(self, number: int) -> dict[str, bytes]:
        """Fetch the files of the signed metadata. Raises ArtefactError if there are none."""
        transfer = MetadataFetch(number, self._device, self._topics, self._limits)
        self._run(transfer)
        if isinstance(transfer.outcome, dict):
            return transfer.outcome
        raise DeadlineError("no signed metadata on the broker", "trying again later")

    def download(self, blob: Blob, sink: Sink) -> None:
        """Fetch the missing chunks of a blob. Raises ArtefactError ("chunk_hash", "enospc"), DeadlineError."""
        transfer = Download(blob, sink, self._device, self._topics, self._limits)
        self._run(transfer)
        if isinstance(failed := transfer.outcome, Failed):
            if failed.reason == Failure.DEADLINE:
                raise DeadlineError(failed.detail, "trying again later")
            raise ArtefactError(failed.detail, failed.reason)

    def _run(self, transfer: Download | MetadataFetch) -> None:
        self._events = queue.SimpleQueue()
        self._transfer = transfer
        try:
            self._carry_out(transfer.begin(time.monotonic()))
            while transfer.outcome is None:
                if self._closed:
                    raise StoppedError("the agent stops")
                left_s = min(max(transfer.wake_s - time.monotonic(), 0.0), POLL_S)
                try:
                    event = self._events.get(timeout=left_s)
                except queue.Empty:
                    pass
                else:
                    self._carry_out(self._handled(transfer, event))
                self._carry_out(transfer.tick(time.monotonic()))
        finally:
            self._transfer = None

    def _handled(self, transfer: Download | MetadataFetch, event: Event) -> Iterable[Effect]:
        now_s = time.monotonic()
        match event:
            case Connected():
                return transfer.begin(now_s)
            case Disconnected():
                transfer.pause()
            case Packet():
                return self._received(transfer, event, now_s)
        return ()

    def _received(self, transfer: Download | MetadataFetch, packet: Packet, now_s: float) -> Iterable[Effect]:
        try:
            address = self._topics.parse(packet.topic)
        except ProtocolError:
            return ()
        match transfer, address:
            case Download(), Address("art", path=(sha256, _, index)) if sha256 == transfer.blob.sha256:
                return transfer.chunk(int(index), packet.payload, now_s)
            case MetadataFetch(), Address("tuf", path=(file,)):
                transfer.file(file, packet.payload, now_s)
            case MetadataFetch(), Address("echo"):
                with suppress(ProtocolError):
                    transfer.echo(decode(packet.payload, Echo), now_s)
        return ()
