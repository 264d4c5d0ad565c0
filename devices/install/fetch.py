"""Fetching what the broker retains: the chunks of a blob, group after group, and the signed metadata, all of it at once.

Like the agent these know neither socket nor clock: they are told what arrived and what time it is, and say what to subscribe. A chunk
is verified before it is kept; one that is bad or does not come is asked for again, the server too in the end, and then it is a failure.
So chunks are subscribed at QoS 0: the broker neither waits for an acknowledgement of each nor writes one down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Struct

from devices.agent.effects import Effect, Publish, Subscribe, Unsubscribe
from devices.agent.events import Failed, Fetched
from edge_fl.errors import ArtefactError
from edge_fl.wire.blob import Blob
from edge_fl.wire.messages import Echo, Request
from edge_fl.wire.topics import GROUP, Topics

AHEAD = GROUP // 2  # chunks under way, at or below which the next group is asked for
MAX_MISSING = 1024
MAX_FILES = 256


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """A group is given up `stall_s` after its last chunk, `tries` times over.

    The metadata end once all that they name is here and so is the echo behind them (a new root is named by nothing); without an echo,
    once nothing more has come for `quiet_s`; and in any case `metadata_s` after they were asked for.
    """

    stall_s: float = 20.0
    bad_chunk_s: float = 1.0
    tries: int = 3
    quiet_s: float = 1.0
    metadata_s: float = 10.0


LIMITS = FetchLimits()


class Sink(Protocol):
    """Where verified chunks go: `wire.blob.Assembly` for memory, `Kept` for the disk."""

    @property
    def missing(self) -> list[int]: ...

    def add(self, index: int, payload: bytes) -> bool: ...


class Download:
    """One blob on its way. Effects to carry out come from every call; `outcome` is set when it is over.

    The next group is asked for when half of one is still under way, so that a distant broker is not waited for between groups.
    """

    def __init__(
        self, blob: Blob, sink: Sink, device: str, topics: Topics, limits: FetchLimits = LIMITS
    ) -> None:
        self.blob = blob
        self.outcome: Fetched | Failed | None = None
        self.wake_s = math.inf
        self.begun = False
        self._sink, self._device, self._topics, self._limits = sink, device, topics, limits
        self._missing: dict[int, set[int]] = {}  # by group, ascending
        for index in sink.missing:
            self._missing.setdefault(index // GROUP, set()).add(index)
        self._asked: dict[int, tuple[str, ...]] = {}  # the groups under way, with what is subscribed for each
        self._bad: set[int] = set()
        self._tries = 0
        self._bytes = 0

    @property
    def here_bytes(self) -> int:
        """How much of the blob is verified."""
        whole = len(self.blob.chunks) - self._missing_chunks
        return min(whole * self.blob.chunk_bytes, self.blob.bytes)

    def begin(self, now_s: float) -> Iterator[Effect]:
        """Asks for the first groups that miss something; after a reconnect, again for those under way."""
        self.begun = True
        self.wake_s = now_s + self._limits.stall_s
        for group, before in self._asked.items():
            patterns = self._narrowest(group) if self._bad else before
            if patterns != before:
                yield from _leave(before)
            yield from self._ask(group, patterns)
        yield from self._go_on()

    def chunk(self, index: int, payload: bytes, now_s: float) -> Iterator[Effect]:
        """Takes a chunk that arrived."""
        self._bytes += len(payload)
        group = index // GROUP
        if index not in self._missing.get(group, ()):
            return
        try:
            self._sink.add(index, payload)
        except ArtefactError as error:
            yield from self._refuse(index, error.why or "chunk_hash", now_s)
            return
        self._missing[group].discard(index)
        self._bad.discard(index)
        if not self._bad:
            self.wake_s = now_s + self._limits.stall_s
        if not self._missing[group]:
            del self._missing[group]
            self._tries = 0
            yield from _leave(self._asked.pop(group, ()))
        yield from self._go_on()

    def tick(self, now_s: float) -> Iterator[Effect]:
        """What did not come in time is asked for again: of the broker, then of the server, then no more."""
        if self.outcome or now_s < self.wake_s:
            return
        self._tries += 1
        if self._tries > self._limits.tries + 1:
            yield from self._fail("chunk_hash" if self._bad else "deadline")
            return
        if self._tries > self._limits.tries:
            missing = [index for group in self._missing.values() for index in sorted(group)][:MAX_MISSING]
            ask = Request(f"chunks-{self.blob.sha256[:8]}", "chunks", self.blob.sha256, missing)
            yield Publish(self._topics.request(self._device), ask, expiry_s=60)
        yield from self.begin(now_s)

    def end(self) -> Iterator[Effect]:
        """Nobody wants it any more."""
        self.wake_s = math.inf
        for patterns in self._asked.values():
            yield from _leave(patterns)

    @property
    def _missing_chunks(self) -> int:
        return sum(map(len, self._missing.values()))

    def _go_on(self) -> Iterator[Effect]:
        """Asks for more, but nothing new behind a bad chunk; or it is over."""
        if not self._missing:
            self.outcome = Fetched(self.blob.sha256, self._bytes)
            self.wake_s = math.inf
        while not self._bad and sum(len(self._missing[group]) for group in self._asked) <= AHEAD:
            group = next((group for group in self._missing if group not in self._asked), None)
            if group is None:
                return
            yield from self._ask(group, self._narrowest(group))

    def _ask(self, group: int, patterns: tuple[str, ...]) -> Iterator[Effect]:
        self._asked[group] = patterns
        for pattern in patterns:
            yield Subscribe(pattern, qos=0)

    def _narrowest(self, group: int) -> tuple[str, ...]:
        """The whole group when all of it is missing, or else one topic for each chunk that is: what is here does not come again."""
        missing, chunks = self._missing[group], len(self.blob.chunks)
        if len(missing) == min(GROUP, chunks - group * GROUP):
            return (self._topics.chunk_group(self.blob.sha256, group),)
        return tuple(self._topics.chunk(self.blob.sha256, index) for index in sorted(missing))

    def _refuse(self, index: int, why: str, now_s: float) -> Iterator[Effect]:
        if why != "chunk_hash":  # a full disk does not get better by asking again
            yield from self._fail(why)
            return
        self._bad.add(index)
        self.wake_s = min(self.wake_s, now_s + self._limits.bad_chunk_s)

    def _fail(self, reason: str) -> Iterator[Effect]:
        missing, chunks = self._missing_chunks, len(self.blob.chunks)
        self.outcome = Failed(
            reason, detail=f"blob {self.blob.sha256[:8]}: {missing} of {chunks} chunks missing"
        )
        yield from self.end()


def _leave(patterns: Iterable[str]) -> Iterator[Effect]:
    return map(Unsubscribe, patterns)


class MetadataFetch:
    """The signed metadata on their way, for a release that is wanted. `outcome` is the files by name, or a Failed without a timestamp."""

    def __init__(self, release: int, device: str, topics: Topics, limits: FetchLimits = LIMITS) -> None:
        self.release = release
        self.outcome: dict[str, bytes] | Failed | None = None
        self.wake_s = math.inf
        self.begun = True
        self._files: dict[str, bytes] = {}
        self._pattern, self._limits = topics.tuf("+"), limits
        self._topic, self._asked = topics.echo(device), 0
        self._due_s = math.inf

    def begin(self, now_s: float) -> Iterator[Effect]:
        """Asks for everything; also after a reconnect."""
        self._asked += 1
        self._due_s = self.wake_s = now_s + self._limits.metadata_s
        yield Subscribe(self._pattern)
        yield Publish(self._topic, self._echo, expiry_s=60)

    @property
    def _echo(self) -> Echo:
        return Echo(f"release-{self.release}-{self._asked}")

    def file(self, name: str, payload: bytes, now_s: float) -> None:
        """Takes a file that arrived; an empty one was cleared."""
        if payload and len(self._files) < MAX_FILES:
            self._files[name] = payload
        self.wake_s = (
            min(self._due_s, now_s + self._limits.quiet_s) if _complete(self._files) else self._due_s
        )

    def echo(self, echo: Echo, now_s: float) -> None:
        """What the device said to itself when it asked is back: everything that the broker had then is here."""
        if echo == self._echo and _complete(self._files):
            self.wake_s = now_s

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
