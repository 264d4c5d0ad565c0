"""A bad link as a transport around a transport: it drops, delays, doubles, reorders and corrupts what passes, is slow, and can be cut.

What happens to the n-th packet of a kind in one direction follows from the seed and from nothing else, so that the same faults come again
however threads take turns. Everything happens on the thread of one loop, which any number of links share.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from edge_fl.errors import ConnectError, DeadlineError, EdgeFLError, ProtocolError
from edge_fl.seeds import seed_for
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import (
    LIMITS,
    Disconnected,
    Event,
    Listener,
    Packet,
    Transport,
    deliver_event,
    require_pattern,
    require_sendable,
)

log = logging.getLogger(__name__)

Chance = Annotated[float, Meta(ge=0, le=1)]
Direction = Literal["up", "down"]
MakeTransport = Callable[..., Transport]


class Faults(Struct, frozen=True, forbid_unknown_fields=True):
    """What a link does to packets, by chance. `delay_s` is the most, drawn evenly from 0; one that is `reorder`ed comes `reorder_s` late.

    `bytes_per_s` is the link's speed in each direction (0: as fast as it goes).
    """

    drop: Chance = 0.0
    duplicate: Chance = 0.0
    reorder: Chance = 0.0
    corrupt: Chance = 0.0
    delay_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    reorder_s: Annotated[float, Meta(ge=0, le=60)] = 0.2
    bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0


NONE = Faults()


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one packet: how many copies arrive, how late, out of its turn or not, and where it is spoilt (0..1, or nowhere)."""

    copies: int
    delay_s: float
    overtaken: bool
    spoilt: float | None


def fate_of(faults: Faults, seed: int, client: str, direction: Direction, kind: str, number: int) -> Fate:
    """The fate of the `number`-th packet of a kind that one client sends ("up") or receives ("down")."""
    draw = random.Random(seed_for(seed, f"chaos.{direction}.{kind}", number, client)).random
    dropped, doubled, overtaken, spoilt = (
        draw() < chance for chance in (faults.drop, faults.duplicate, faults.reorder, faults.corrupt)
    )
    place, delay_s = draw(), draw() * faults.delay_s
    return Fate(0 if dropped else 1 + doubled, delay_s, overtaken, place if spoilt else None)


def spoil(packet: Packet, place: float) -> Packet:
    """The packet with one byte of its payload wrong, at a share of its length."""
    at = int(place * len(packet.payload))
    flipped = bytes(byte ^ 0x55 for byte in packet.payload[at : at + 1])
    return replace(packet, payload=packet.payload[:at] + flipped + packet.payload[at + 1 :])


class FaultyTransport(Transport):
    """A client behind a bad link. `connect` makes the client itself: `partial(MqttTransport, endpoint)`, with the same arguments."""

    def __init__(
        self,
        connect: MakeTransport,
        faults: Faults,
        seed: int,
        loop: MqttLoop,
        client_id: str,
        will: Packet | None,
        deliver: Listener,
        **options: Any,
    ) -> None:
        self.client_id = client_id
        self._connect = partial(connect, client_id, will, **options)
        self._faults, self._seed, self._loop, self._deliver = faults, seed, loop, deliver
        self._counts: Counter[tuple[Direction, str]] = Counter()
        # when the link has sent what came before
        self._free_s: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self._last_s: dict[Direction, float] = {"up": 0.0, "down": 0.0}  # when the last one arrives
        self._held: list[Callable[[Transport], None]] = []  # while the link is cut
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = self._over = False
        self._lives = 0
        self._inner: Transport | None = self._client()

    def publish(self, packet: Packet) -> None:
        require_sendable(packet, LIMITS.max_packet_bytes)
        self._ask(lambda: self._pass("up", packet, lambda passed: self._do(lambda t: t.publish(passed))))

    def subscribe(self, pattern: str, *, qos: int = 1) -> None:
        require_pattern(pattern)
        self._ask(lambda: self._behind("up", lambda: self._do(lambda t: t.subscribe(pattern, qos=qos))))

    def unsubscribe(self, pattern: str) -> None:
        self._ask(lambda: self._behind("up", lambda: self._do(lambda t: t.unsubscribe(pattern))))

    def wait_connected(self, deadline_s: float) -> None:
        if (inner := self._inner) is None:
            raise ConnectError(f"{self.client_id}: the link is cut; expected one; it will be back")
        inner.wait_connected(deadline_s)

    def drain(self, deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or (not self._under_way and self._inner is not None), deadline_s
            )
            left, inner = self._under_way, self._inner
        if left or inner is None:
            raise DeadlineError(
                f"{self.client_id}: {left} packets are still on a bad link after {deadline_s:g} s"
            )
        inner.drain(max(0.0, until_s - time.monotonic()))

    def close(self, *, clean: bool = True) -> None:
        self._closed = True
        inner, self._inner = self._inner, None
        if inner:
            inner.close(clean=clean)

    def cut(self, for_s: float) -> None:
        """Breaks the link for a while; what was under way is lost. Infinity: for good, as when the broker refuses this client."""
        self._ask(lambda: self._cut(for_s))

    def _cut(self, for_s: float) -> None:
        inner, self._inner = self._inner, None
        self._lives += 1
        if inner is None or self._closed:
            return
        inner.close(clean=False)
        final = for_s == float("inf")
        with self._changed:
            self._over = final
            self._changed.notify_all()
        self._emit(Disconnected("the link is cut", final=final))
        if not final:
            self._loop.later(for_s, self._mend)

    def _mend(self) -> None:
        if self._closed or self._inner:
            return
        with self._changed:
            self._inner = self._client()
            held, self._held = self._held, []
            self._changed.notify_all()
        for step in held:
            self._do(step)

    def _client(self) -> Transport:
        life = self._lives
        return self._connect(lambda event: self._loop.call(lambda: self._arrived(life, event)))

    def _arrived(self, life: int, event: Event) -> None:
        if life != self._lives:
            return
        if isinstance(event, Packet):
            self._pass("down", event, self._emit)
        else:
            self._behind("down", lambda: self._emit(event))

    def _pass(self, direction: Direction, packet: Packet, hand: Callable[[Packet], None]) -> None:
        """Lets a packet through as its fate has it."""
        kind, faults = _kind(packet.topic), self._faults
        self._counts[direction, kind] += 1
        fate = fate_of(faults, self._seed, self.client_id, direction, kind, self._counts[direction, kind])
        if not fate.copies:
            return
        if fate.spoilt is not None:
            packet = spoil(packet, fate.spoilt)
        now_s = time.monotonic()
        busy_s = len(packet.payload) / faults.bytes_per_s if faults.bytes_per_s else 0.0
        self._free_s[direction] = max(now_s, self._free_s[direction]) + busy_s
        due_s = max(self._free_s[direction] + fate.delay_s, self._last_s[direction])
        if fate.overtaken:
            due_s += faults.reorder_s  # and those behind it do not wait
        else:
            self._last_s[direction] = due_s
        for _ in range(fate.copies):
            self._at(due_s, lambda: hand(packet))

    def _behind(self, direction: Direction, step: Callable[[], None]) -> None:
        """Something that no link loses, but not before what was there earlier."""
        due_s = self._last_s[direction] = max(time.monotonic(), self._last_s[direction])
        self._at(due_s, step)

    def _at(self, due_s: float, step: Callable[[], None]) -> None:
        take = self._counted(step)
        self._loop.at(due_s, take)

    def _counted(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step, under way until it has been taken."""

        def take() -> None:
            try:
                step()
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()

        with self._changed:
            self._under_way += 1
        return take

    def _do(self, step: Callable[[Transport], None]) -> None:
        """What the client itself is asked for; it waits for the link while that is cut."""
        if self._inner is None:
            self._held.append(step)
            return
        try:
            step(self._inner)
        except EdgeFLError as error:
            log.warning("%s: %s", self.client_id, error)

    def _emit(self, event: Event) -> None:
        if not self._closed:
            deliver_event(event, self._deliver, self.client_id)

    def _ask(self, step: Callable[[], None]) -> None:
        if not self._closed:
            self._loop.call(self._counted(step))


def _kind(topic: str) -> str:
    """The kind of message, from its topic in whatever fleet."""
    try:
        return Topics(topic.split("/")[2]).parse(topic).kind
    except (ProtocolError, IndexError):
        return ""
