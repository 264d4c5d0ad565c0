"""Downloads from the broker's retained messages: the chunks of a blob, group by group, and the signed metadata.

Sans-IO like the agent: every call is given what arrived and the time, and yields the subscriptions to make. Chunks are verified before
they are kept. A bad or missing chunk is requested again, at last from the server, and then the download fails. Chunks are subscribed
at QoS 0: the broker neither waits for acknowledgements nor stores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from edge_fl.blob import Assembly, Blob
from edge_fl.errors import ArtefactError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.untrusted import NOT_JSON
from edge_fl.wire.messages import Echo, Request, decode
from edge_fl.wire.topics import GROUP, Address, Topics
from edge_fl_devices.agent.effects import Effect, Publish, Subscribe, Unsubscribe
from edge_fl_devices.agent.events import Failed, Fetched
from edge_fl_devices.storage.chunks import ChunkSink

AHEAD = GROUP // 2  # the next group is subscribed when at most this many chunks are outstanding
MAX_MISSING = 1024
MAX_FILES = 256


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Time-outs of downloads.

    A group is subscribed again `stall_s` after its last chunk, `tries` times; a bad chunk after `bad_chunk_s`. The metadata are
    complete once every file that they name and the echo have arrived (nothing names a new root); without an echo, after `quiet_s`
    without another file; at the latest `metadata_s` after the subscription.
    """

    stall_s: float = 20.0
    bad_chunk_s: float = 1.0
    tries: int = 3
    quiet_s: float = 1.0
    metadata_s: float = 10.0


LIMITS = FetchLimits()
Sink = Assembly | ChunkSink
"""Destination of verified chunks: in memory or on disk."""


class _Fetch:
    """`wake_s`: when the next tick is due, on the clock of `now_s`."""

    wake_s = math.inf

    def pause(self) -> None:
        """Wait for the next connection: time without one does not count."""
        self.wake_s = math.inf


class Download(_Fetch):
    """Download of one blob. Every call yields effects to carry out; `outcome` is set at the end.

    The next group is subscribed when half of the current one has arrived, which hides the round trip to a distant broker.
    """

    def __init__(
        self, blob: Blob, sink: Sink, device: str, topics: Topics, limits: FetchLimits = LIMITS
    ) -> None:
        self.blob = blob
        self.outcome: Fetched | Failed | None = None
        self.begun = False
        self._sink, self._device, self._topics, self._limits = sink, device, topics, limits
        self._missing: dict[int, set[int]] = {}  # chunk indices by group, ascending
        for index in sink.missing:
            self._missing.setdefault(index // GROUP, set()).add(index)
        self._subscribed: dict[int, tuple[str, ...]] = {}  # topic patterns by group
        self._bad: set[int] = set()
        self._tries = 0
        self._bytes = 0

    @property
    def verified_bytes(self) -> int:
        """How many bytes of the blob are verified."""
        whole = len(self.blob.chunks) - self._missing_chunks
        return min(whole * self.blob.chunk_bytes, self.blob.bytes)

    def begin(self, now_s: float) -> Iterator[Effect]:
        """Subscribe to the first incomplete groups; after a reconnect, again to those outstanding."""
        self.begun = True
        self.wake_s = now_s + self._limits.stall_s
        for group, before in self._subscribed.items():
            patterns = self._narrowest(group) if self._bad else before
            if patterns != before:
                yield from _unsubscribe(before)
            yield from self._subscribe(group, patterns)
        yield from self._continue()

    def received(self, address: Address, payload: bytes, now_s: float) -> Iterable[Effect]:
        """Take a message if it is a chunk of the blob."""
        match address:
            case Address("art", path=(self.blob.sha256, _, index)) if payload:
                return self.chunk(int(index), payload, now_s)
        return ()

    def chunk(self, index: int, payload: bytes, now_s: float) -> Iterator[Effect]:
        """Verify and keep a chunk that arrived."""
        self._bytes += len(payload)
        group = index // GROUP
        if index not in self._missing.get(group, ()):
            return
        try:
            self._sink.add(index, payload)
        except ArtefactError as error:
            if error.why not in (None, Failure.CHUNK_HASH):  # such as a full disk: a retry does not help
                yield from self._fail(error.why)
                return
            self._bad.add(index)
            self.wake_s = min(self.wake_s, now_s + self._limits.bad_chunk_s)
            return
        self._missing[group].discard(index)
        self._bad.discard(index)
        if not self._bad:
            self.wake_s = now_s + self._limits.stall_s
        if not self._missing[group]:
            del self._missing[group]
            self._tries = 0
            yield from _unsubscribe(self._subscribed.pop(group, ()))
        yield from self._continue()

    def tick(self, now_s: float) -> Iterator[Effect]:
        """Request overdue chunks again: from the broker, then from the server; then fail."""
        if self.outcome or now_s < self.wake_s:
            return
        self._tries += 1
        if self._tries > self._limits.tries + 1:
            yield from self._fail(Failure.CHUNK_HASH if self._bad else Failure.DEADLINE)
            return
        if self._tries > self._limits.tries:
            missing = [index for group in self._missing.values() for index in sorted(group)][:MAX_MISSING]
            request = Request(f"chunks-{self.blob.sha256[:8]}", "chunks", self.blob.sha256, missing)
            yield Publish(self._topics.up(self._device, "req"), request, expiry_s=60)
        yield from self.begin(now_s)

    def cancel(self) -> Iterator[Effect]:
        """Cancel the download."""
        self.wake_s = math.inf
        for patterns in self._subscribed.values():
            yield from _unsubscribe(patterns)

    @property
    def _missing_chunks(self) -> int:
        return sum(map(len, self._missing.values()))

    def _continue(self) -> Iterator[Effect]:
        """Finish, or subscribe to the next group unless a bad chunk is outstanding."""
        if not self._missing:
            self.outcome = Fetched(self.blob.sha256, self._bytes)
            self.wake_s = math.inf
        while not self._bad and sum(len(self._missing[group]) for group in self._subscribed) <= AHEAD:
            group = next((group for group in self._missing if group not in self._subscribed), None)
            if group is None:
                return
            yield from self._subscribe(group, self._narrowest(group))

    def _subscribe(self, group: int, patterns: tuple[str, ...]) -> Iterator[Effect]:
        self._subscribed[group] = patterns
        for pattern in patterns:
            yield Subscribe(pattern, qos=0)

    def _narrowest(self, group: int) -> tuple[str, ...]:
        """The whole group if all of it is missing, else one topic per missing chunk, so that no chunk arrives twice."""
        missing, chunks = self._missing[group], len(self.blob.chunks)
        if len(missing) == min(GROUP, chunks - group * GROUP):
            return (self._topics.chunk_group(self.blob.sha256, group),)
        return tuple(self._topics.chunk(self.blob.sha256, index) for index in sorted(missing))

    def _fail(self, reason: Failure) -> Iterator[Effect]:
        missing, chunks = self._missing_chunks, len(self.blob.chunks)
        self.outcome = Failed(
            reason, detail=f"blob {self.blob.sha256[:8]}: {missing} of {chunks} chunks missing"
        )
        yield from self.cancel()


def _unsubscribe(patterns: Iterable[str]) -> Iterator[Effect]:
    return map(Unsubscribe, patterns)


class MetadataFetch(_Fetch):
    """Fetch of the signed metadata for a release (0: for the keys that they name). `outcome`: the files by name, or Failed if there is no
    timestamp.
    """

    def __init__(self, release: int, device: str, topics: Topics, limits: FetchLimits = LIMITS) -> None:
        self.release = release
        self.outcome: dict[str, bytes] | Failed | None = None
        self.begun = True
        self._files: dict[str, bytes] = {}
        self._pattern, self._limits = topics.tuf("+"), limits
        self._echo_topic, self._attempt = topics.down(device, "echo"), 0
        self._due_s = math.inf

    def begin(self, now_s: float) -> Iterator[Effect]:
        """Subscribe to all files; also after a reconnect."""
        self._attempt += 1
        self._due_s = self.wake_s = now_s + self._limits.metadata_s
        yield Subscribe(self._pattern)
        yield Publish(self._echo_topic, self._echo, expiry_s=60)

    @property
    def _echo(self) -> Echo:
        return Echo(f"release-{self.release}-{self._attempt}")

    def received(self, address: Address, payload: bytes, now_s: float) -> Iterable[Effect]:
        """Take a message if it is a file or the echo."""
        match address:
            case Address("tuf", path=(name,)):
                self.file(name, payload, now_s)
            case Address("echo"):
                with suppress(ProtocolError):
                    self.echo(decode(payload, Echo), now_s)
        return self.tick(now_s)

    def file(self, name: str, payload: bytes, now_s: float) -> None:
        """Keep a file that arrived; an empty one was cleared."""
        if payload and len(self._files) < MAX_FILES:
            self._files[name] = payload
        self.wake_s = (
            min(self._due_s, now_s + self._limits.quiet_s) if _complete(self._files) else self._due_s
        )

    def echo(self, echo: Echo, now_s: float) -> None:
        """End the fetch if complete: after the echo, everything that was retained has arrived."""
        if echo == self._echo and _complete(self._files):
            self.wake_s = now_s

    def tick(self, now_s: float) -> Iterator[Effect]:
        """End the fetch if it is due. Whether the files are sufficient is decided by their signatures."""
        if self.outcome is not None or now_s < self.wake_s:
            return
        self.wake_s = math.inf
        missing = "timestamp.json" not in self._files
        self.outcome = (
            Failed(Failure.MISSING, detail="no signed metadata retained") if missing else self._files
        )
        yield Unsubscribe(self._pattern)


def _complete(files: Mapping[str, bytes]) -> bool:
    """Return whether the snapshot named by the timestamp and the targets named by it are present.

    An unreadable file names no others.
    """
    name = "timestamp.json"
    for role in ("snapshot", "targets"):
        if name not in files:
            return False
        try:
            version = int(msgspec.json.decode(files[name])["signed"]["meta"][f"{role}.json"]["version"])
        except (ValueError, LookupError, TypeError, *NOT_JSON):
            return True
        name = f"{version}.{role}.json"
    return name in files
