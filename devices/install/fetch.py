"""Fetching what the broker retains: the chunks of a blob, one group after the other, and the signed metadata, all of it at once.

Like the agent these know neither socket nor clock: they are told what arrived and what time it is, and say what to subscribe. A chunk
is verified before it is kept; one that is bad or does not come is asked for again, the server too in the end, and then it is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Struct

from devices.machine.effects import Effect, Publish, Subscribe, Unsubscribe
from devices.machine.events import Failed, Fetched
from edge_fl.errors import ArtefactError
from edge_fl.wire.blob import Blob
from edge_fl.wire.messages import Request
from edge_fl.wire.topics import GROUP, Topics

MAX_MISSING = 1024
MAX_FILES = 256


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """A group is given up `stall_s` after its last chunk, `tries` times over. The metadata end once all that they name is here and nothing
    more has come for `quiet_s` (a new root is named by nothing), or `metadata_s` after they were asked for.
    """

    stall_s: float = 20.0
    bad_chunk_s: float = 1.0
    tries: int = 3
    quiet_s: float = 0.1
    metadata_s: float = 10.0


LIMITS = FetchLimits()


class Sink(Protocol):
    """Where verified chunks go: `wire.blob.Assembly` for memory, `Kept` for the disk."""

    @property
    def missing(self) -> list[int]: ...

    def add(self, index: int, payload: bytes) -> bool: ...


class Download:
    """One blob on its way. Effects to carry out come from every call; `outcome` is set when it is over."""

    def __init__(
        self, blob: Blob, sink: Sink, device: str, topics: Topics, limits: FetchLimits = LIMITS
    ) -> None:
        self.blob = blob
        self.outcome: Fetched | Failed | None = None
        self.wake_s = math.inf
        self.begun = False
        self._sink, self._device, self._topics, self._limits = sink, device, topics, limits
        self._missing = set(sink.missing)
        self._group = -1
        self._patterns: tuple[str, ...] = ()
        self._tries = 0
        self._bad = False
        self._bytes = 0

    @property
    def here_bytes(self) -> int:
        """How much of the blob is verified."""
        whole = len(self.blob.chunks) - len(self._missing)
        return min(whole * self.blob.chunk_bytes, self.blob.bytes)

    def begin(self, now_s: float) -> Iterator[Effect]:
        """Asks for the first group that misses something; also after a reconnect, for the group under way."""
        self.begun = True
        if not self._missing:
            self.outcome = Fetched(self.blob.sha256, self._bytes)
            self.wake_s = math.inf
            return
        group = min(self._missing) // GROUP
        if group != self._group:
            self._group, self._tries, self._bad = group, 0, False
            self._patterns = self._narrowest()
        elif self._bad and self._patterns != (narrowest := self._narrowest()):
            yield from self._leave()
            self._patterns = narrowest
        self.wake_s = now_s + self._limits.stall_s
        for pattern in self._patterns:
            yield Subscribe(pattern)

    def chunk(self, index: int, payload: bytes, now_s: float) -> Iterator[Effect]:
        """Takes a chunk that arrived."""
        self._bytes += len(payload)
        if index not in self._missing:
            return
        try:
            self._sink.add(index, payload)
        except ArtefactError as error:
            yield from self._refuse(error.why or "chunk_hash", now_s)
            return
        self._missing.discard(index)
        self.wake_s = now_s + self._limits.stall_s
        if not any(index // GROUP == self._group for index in self._missing):
            yield from self._leave()
            yield from self.begin(now_s)

    def tick(self, now_s: float) -> Iterator[Effect]:
        """What did not come in time is asked for again: of the broker, then of the server, then no more."""
        if self.outcome or now_s < self.wake_s:
            return
        self._tries += 1
        if self._tries > self._limits.tries + 1:
            yield from self._fail("chunk_hash" if self._bad else "deadline")
            return
        if self._tries > self._limits.tries:
            missing = sorted(self._missing)[:MAX_MISSING]
            ask = Request(f"chunks-{self.blob.sha256[:8]}", "chunks", self.blob.sha256, missing)
            yield Publish(self._topics.request(self._device), ask, expiry_s=60)
        yield from self.begin(now_s)

    def end(self) -> Iterator[Effect]:
        """Nobody wants it any more."""
        self.wake_s = math.inf
        yield from self._leave()

    def _narrowest(self) -> tuple[str, ...]:
        """The whole group when all of it is missing, or else one topic for each chunk that is: what is here does not come again."""
        first = self._group * GROUP
        members = range(first, min(first + GROUP, len(self.blob.chunks)))
        missing = [index for index in members if index in self._missing]
        if len(missing) == len(members):
            return (self._topics.chunk_group(self.blob.sha256, self._group),)
        return tuple(self._topics.chunk(self.blob.sha256, index) for index in missing)

    def _leave(self) -> Iterator[Effect]:
        for pattern in self._patterns:
            yield Unsubscribe(pattern)

    def _refuse(self, why: str, now_s: float) -> Iterator[Effect]:
        if why != "chunk_hash":  # a full disk does not get better by asking again
            yield from self._fail(why)
            return
        self._bad = True
        self.wake_s = min(self.wake_s, now_s + self._limits.bad_chunk_s)

    def _fail(self, reason: str) -> Iterator[Effect]:
        self.outcome = Failed(
            reason,
            detail=f"blob {self.blob.sha256[:8]}: {len(self._missing)} of {len(self.blob.chunks)} chunks missing",
        )
        self.wake_s = math.inf
        yield from self._leave()


class Gathering:
    """The signed metadata on their way, for a release that is wanted. `outcome` is the files by name, or a Failed without a timestamp."""

    def __init__(self, release: int, topics: Topics, limits: FetchLimits = LIMITS) -> None:
        self.release = release
        self.outcome: dict[str, bytes] | Failed | None = None
        self.wake_s = math.inf
        self.begun = True
        self._files: dict[str, bytes] = {}
        self._pattern, self._limits = topics.tuf("+"), limits
        self._due_s = math.inf

    def begin(self, now_s: float) -> Iterator[Effect]:
        """Asks for everything; also after a reconnect."""
        self._due_s = self.wake_s = now_s + self._limits.metadata_s
        yield Subscribe(self._pattern)

    def file(self, name: str, payload: bytes, now_s: float) -> None:
        """Takes a file that arrived; an empty one was cleared."""
        if payload and len(self._files) < MAX_FILES:
            self._files[name] = payload
        self.wake_s = (
            min(self._due_s, now_s + self._limits.quiet_s) if _complete(self._files) else self._due_s
        )

    def tick(self, now_s: float) -> Iterator[Effect]:
        """Ends when no more files come; whether those that came will do is for the signatures to say."""
        if self.outcome is not None or now_s < self.wake_s:
            return
        self.wake_s = math.inf
        found = "timestamp.json" in self._files
        self.outcome = self._files if found else Failed("missing", detail="no signed metadata retained")
        yield Unsubscribe(self._pattern)


class _Version(Struct):
    version: int


class _Signed(Struct):
    meta: dict[str, _Version]


class _Metadata(Struct):
    signed: _Signed


def _complete(files: Mapping[str, bytes]) -> bool:
    """Whether the snapshot that the timestamp names is here, and the targets that it names; what cannot be read names nothing more."""
    name = "timestamp.json"
    for named in ("snapshot", "targets"):
        if name not in files:
            return False
        try:
            version = msgspec.json.decode(files[name], type=_Metadata).signed.meta[f"{named}.json"].version
        except (msgspec.DecodeError, KeyError):
            return True
        name = f"{version}.{named}.json"
    return name in files
