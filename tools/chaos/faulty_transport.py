"""A transport that wraps another one and drops, delays, duplicates, reorders, corrupts and slows down packets; it can be cut.

The fault of the n-th packet of a kind in one direction depends only on the seed, so the faults are reproducible whatever the thread
timing. All callbacks run on the thread of one loop, which several transports may share.
"""

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
    """Fault probabilities per packet. The delay is uniform in 0..`delay_s`; a reordered packet arrives `reorder_s` later.

    `bytes_per_s` is the speed of the connection in each direction (0: unlimited).
    """

    drop: Chance = 0.0
    duplicate: Chance = 0.0
    reorder: Chance = 0.0
    corrupt: Chance = 0.0
    delay_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    reorder_s: Annotated[float, Meta(ge=0, le=60)] = 0.2
    bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class PacketFault:
    """Fault of one packet: number of copies that arrive, delay, whether it is reordered, and where it is corrupted (0..1 of its length)."""

    copies: int
    delay_s: float
    reordered: bool
    corrupt_at: float | None


def draw_fault(
    faults: Faults, seed: int, client: str, direction: Direction, kind: str, number: int
) -> PacketFault:
    """Draw the fault of the `number`-th packet of a kind that a client sends ("up") or receives ("down")."""
    draw = random.Random(seed_for(seed, f"chaos.{direction}.{kind}", number, client)).random
    dropped, duplicated, reordered, corrupted = (
        draw() < chance for chance in (faults.drop, faults.duplicate, faults.reorder, faults.corrupt)
    )
    place, delay_s = draw(), draw() * faults.delay_s
    return PacketFault(0 if dropped else 1 + duplicated, delay_s, reordered, place if corrupted else None)


def corrupt(packet: Packet, place: float) -> Packet:
    """Change one byte of the payload, at this fraction of its length."""
    at = int(place * len(packet.payload))
    flipped = bytes(byte ^ 0x55 for byte in packet.payload[at : at + 1])
    return replace(packet, payload=packet.payload[:at] + flipped + packet.payload[at + 1 :])


class FaultyTransport(Transport):
    """A client with a bad connection. `connect` makes the wrapped client, for example `partial(MqttTransport, endpoint)`."""

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
        # end of the transmission of the previous packet, and its arrival
        self._free_s: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self._last_s: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self._held: list[Callable[[Transport], None]] = []  # while the connection is cut
        self._changed = threading.Condition()
        self._pending = 0
        self._closed = self._denied = False
        self._cuts = 0
        self._inner: Transport | None = self._reconnect()

    def publish(self, packet: Packet) -> None:
        require_sendable(packet, LIMITS.max_packet_bytes)
        self._call(lambda: self._pass("up", packet, lambda passed: self._do(lambda t: t.publish(passed))))

    def subscribe(self, pattern: str, *, qos: int = 1) -> None:
        require_pattern(pattern)
        self._call(lambda: self._in_order("up", lambda: self._do(lambda t: t.subscribe(pattern, qos=qos))))

    def unsubscribe(self, pattern: str) -> None:
        self._call(lambda: self._in_order("up", lambda: self._do(lambda t: t.unsubscribe(pattern))))

    def wait_connected(self, deadline_s: float) -> None:
        if (inner := self._inner) is None:
            raise ConnectError(f"{self.client_id}: the connection is cut for now")
        inner.wait_connected(deadline_s)

    def drain(self, deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._denied or (not self._pending and self._inner is not None), deadline_s
            )
            left, inner = self._pending, self._inner
        if left or inner is None:
            raise DeadlineError(
                f"{self.client_id}: {left} packets are still pending on a bad connection after {deadline_s:g} s"
            )
        inner.drain(max(0.0, until_s - time.monotonic()))

    def close(self, *, clean: bool = True) -> None:
        self._closed = True
        inner, self._inner = self._inner, None
        if inner:
            inner.close(clean=clean)

    def cut(self, duration_s: float) -> None:
        """Cut the connection and lose pending packets. Infinity: permanently, as when the broker denies access."""
        self._call(lambda: self._cut(duration_s))

    def _cut(self, duration_s: float) -> None:
        inner, self._inner = self._inner, None
        self._cuts += 1
        if inner is None or self._closed:
            return
        inner.close(clean=False)
        final = duration_s == float("inf")
        with self._changed:
            self._denied = final
            self._changed.notify_all()
        self._emit(Disconnected("the connection is cut", final=final))
        if not final:
            self._loop.later(duration_s, self._restore)

    def _restore(self) -> None:
        if self._closed or self._inner:
            return
        with self._changed:
            self._inner = self._reconnect()
            held, self._held = self._held, []
            self._changed.notify_all()
        for step in held:
            self._do(step)

    def _reconnect(self) -> Transport:
        cuts = self._cuts
        return self._connect(lambda event: self._loop.call(lambda: self._receive(cuts, event)))

    def _receive(self, cuts: int, event: Event) -> None:
        if cuts != self._cuts:  # from a connection that has been cut
            return
        if isinstance(event, Packet):
            self._pass("down", event, self._emit)
        else:
            self._in_order("down", lambda: self._emit(event))

    def _pass(self, direction: Direction, packet: Packet, deliver: Callable[[Packet], None]) -> None:
        """Deliver a packet with its fault."""
        kind, faults = _kind(packet.topic), self._faults
        self._counts[direction, kind] += 1
        fault = draw_fault(faults, self._seed, self.client_id, direction, kind, self._counts[direction, kind])
        if not fault.copies:
            return
        if fault.corrupt_at is not None:
            packet = corrupt(packet, fault.corrupt_at)
        now_s = time.monotonic()
        busy_s = len(packet.payload) / faults.bytes_per_s if faults.bytes_per_s else 0.0
        self._free_s[direction] = max(now_s, self._free_s[direction]) + busy_s
        due_s = max(self._free_s[direction] + fault.delay_s, self._last_s[direction])
        if fault.reordered:
            due_s += faults.reorder_s  # the packets after it do not wait
        else:
            self._last_s[direction] = due_s
        for _ in range(fault.copies):
            self._at(due_s, lambda: deliver(packet))

    def _in_order(self, direction: Direction, step: Callable[[], None]) -> None:
        """Run a step without faults, after everything before it."""
        due_s = self._last_s[direction] = max(time.monotonic(), self._last_s[direction])
        self._at(due_s, step)

    def _at(self, due_s: float, step: Callable[[], None]) -> None:
        self._loop.at(due_s, self._counted(step))

    def _counted(self, step: Callable[[], None]) -> Callable[[], None]:
        """Count the step as pending until it has run."""

        def run() -> None:
            try:
                step()
            finally:
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()

        with self._changed:
            self._pending += 1
        return run

    def _do(self, step: Callable[[Transport], None]) -> None:
        """Call the wrapped client; while the connection is cut, hold the call."""
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

    def _call(self, step: Callable[[], None]) -> None:
        if not self._closed:
            self._loop.call(self._counted(step))


def _kind(topic: str) -> str:
    """Return the kind of message by its topic, in any fleet."""
    try:
        return Topics(topic.split("/")[2]).parse(topic).kind
    except (ProtocolError, IndexError):
        return ""
