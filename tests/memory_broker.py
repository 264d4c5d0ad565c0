"""A broker inside the process, for tests and simulations without a network: what edge-fl uses of MQTT 5, and no more.

Wildcards, retained messages, wills, sessions that keep QoS 1 messages for an absent client, message expiry. One thread carries
everything out in the order in which it was asked for, so an event never arrives inside a call of the transport.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.wire.transport import (
    LIMITS,
    Connected,
    Disconnected,
    Event,
    Listener,
    Packet,
    Transport,
    TransportLimits,
    deliver_event,
    require_pattern,
    require_sendable,
)

CLOSE_S = 5.0


def matches(pattern: str, topic: str) -> bool:
    """Whether a subscription to `pattern`, with + for one level and a last # for all that follow, covers `topic`."""
    wanted, levels = pattern.split("/"), topic.split("/")
    if topic.startswith("$") and wanted[0] in "+#":
        return False
    for index, level in enumerate(wanted):
        if level == "#":
            return True
        if index >= len(levels) or level not in ("+", levels[index]):
            return False
    return len(wanted) == len(levels)


@dataclass(frozen=True)
class Kept:
    """A packet that waits, retained or queued, until `until` on the monotonic clock."""

    packet: Packet
    until: float

    def fresh(self) -> Packet | None:
        """The packet with the expiry that is left, or None when none is."""
        left = self.until - time.monotonic()
        if left <= 0:
            return None
        return replace(self.packet, expiry_s=None if math.isinf(left) else math.ceil(left))


def keep(packet: Packet) -> Kept:
    """The packet from now on."""
    return Kept(packet, math.inf if packet.expiry_s is None else time.monotonic() + packet.expiry_s)


@dataclass
class Session:
    """What the broker knows of one client name; it outlives the connection unless its expiry is 0."""

    client: InMemoryTransport | None = None
    patterns: dict[str, int] = field(default_factory=dict)  # with the QoS that each was subscribed at
    waiting: list[Kept] = field(default_factory=list)


class InMemoryBroker:
    """Sessions and retained messages. Its clients are made with `InMemoryTransport`, which alone calls the methods below `later`."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._retained: dict[str, Kept] = {}
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="edge-fl-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread once everything asked for so far is done."""
        self._steps.put(None)
        if not self.is_current:
            self._thread.join(CLOSE_S)

    def drop(self, client_id: str) -> None:
        """Cuts one client's connection as a failing network would: its will is published, then it connects again."""
        self.later(lambda: self._drop(client_id))

    def forget(self) -> None:
        """Loses everything retained and every session, as a broker that starts again without its database; all connect again."""
        self.later(self._forget)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the broker's thread."""
        return threading.current_thread() is self._thread

    def later(self, step: Callable[[], None]) -> None:
        """Carries out `step` on the broker's thread, after everything asked for before."""
        self._steps.put(step)

    def connect(self, client: InMemoryTransport) -> None:
        """Starts or resumes the client's session; another client of that name is thrown out."""
        if (session := self._sessions.get(client.client_id)) and (other := session.client):
            self.disconnect(other, clean=False)
            other.emit(Disconnected("another client took this name over", final=True))
        if client.clean_start:
            self._sessions.pop(client.client_id, None)
        present = client.client_id in self._sessions
        session = self._sessions.setdefault(client.client_id, Session())
        session.client = client
        client.emit(Connected(session_present=present))
        waiting, session.waiting = session.waiting, []
        for kept in waiting:
            if packet := kept.fresh():
                client.emit(packet)

    def disconnect(self, client: InMemoryTransport, *, clean: bool) -> None:
        """Ends the client's connection; not `clean` publishes its will."""
        session = self._sessions.get(client.client_id)
        if not session or session.client is not client:
            return
        session.client = None
        if not client.session_expiry_s:
            del self._sessions[client.client_id]
        if client.will and not clean:
            self.publish(client.will)

    def publish(self, packet: Packet) -> None:
        """Hands the packet to every session that subscribed to it; retains it, or with an empty payload forgets, when asked to."""
        if packet.retain:
            if packet.payload:
                self._retained[packet.topic] = keep(packet)
            else:
                self._retained.pop(packet.topic, None)
        passed = replace(packet, retain=False)
        for session in list(self._sessions.values()):
            found = [qos for pattern, qos in session.patterns.items() if matches(pattern, packet.topic)]
            if not found:
                continue
            sent = replace(passed, qos=min(packet.qos, max(found)))
            if session.client:
                session.client.emit(sent)
            elif sent.qos:
                session.waiting.append(keep(sent))

    def subscribe(self, client: InMemoryTransport, pattern: str, qos: int) -> None:
        """Adds a subscription and sends what is retained below it, again when it stood already."""
        session = self._sessions.get(client.client_id)
        if not session or session.client is not client:
            return
        session.patterns[pattern] = qos
        for topic, kept in sorted(self._retained.items()):
            if matches(pattern, topic) and (packet := kept.fresh()):
                client.emit(replace(packet, qos=min(packet.qos, qos)))

    def unsubscribe(self, client: InMemoryTransport, pattern: str) -> None:
        """Takes a subscription back."""
        session = self._sessions.get(client.client_id)
        if session and session.client is client:
            session.patterns.pop(pattern, None)

    def _drop(self, client_id: str) -> None:
        session = self._sessions.get(client_id)
        if session and (client := session.client):
            self.disconnect(client, clean=False)
            client.emit(Disconnected("connection dropped"))
            self.connect(client)

    def _forget(self) -> None:
        clients = [session.client for session in self._sessions.values() if session.client]
        self._sessions, self._retained = {}, {}
        for client in clients:
            client.emit(Disconnected("the broker is gone"))
            self.connect(client)

    def _run(self) -> None:
        while step := self._steps.get():
            step()


class InMemoryTransport(Transport):
    """One client of an `InMemoryBroker`; the arguments mean what they mean for `MqttTransport`."""

    def __init__(
        self,
        broker: InMemoryBroker,
        client_id: str,
        will: Packet | None,
        deliver: Listener,
        *,
        session_expiry_s: int = 86400,
        clean_start: bool = False,
        limits: TransportLimits = LIMITS,
    ) -> None:
        self.client_id = client_id
        self.will = will
        self.session_expiry_s = session_expiry_s
        self.clean_start = clean_start
        self._broker = broker
        self._deliver = deliver
        self._limits = limits
        self._closed = False
        self._connected = threading.Event()
        broker.later(lambda: broker.connect(self))

    def publish(self, packet: Packet) -> None:
        require_sendable(packet, self._limits.max_packet_bytes)
        self._ask(lambda: self._broker.publish(packet))

    def subscribe(self, pattern: str, *, qos: int = 1) -> None:
        require_pattern(pattern)
        self._ask(lambda: self._broker.subscribe(self, pattern, qos))

    def unsubscribe(self, pattern: str) -> None:
        self._ask(lambda: self._broker.unsubscribe(self, pattern))

    def wait_connected(self, deadline_s: float) -> None:
        if not self._connected.wait(deadline_s):
            raise ConnectError(
                f"{self.client_id}: the broker in memory did not answer in {deadline_s:g} s; is it closed?"
            )

    def drain(self, deadline_s: float) -> None:
        done = threading.Event()
        self._broker.later(done.set)
        if not done.wait(deadline_s):
            raise DeadlineError(
                f"{self.client_id}: publications not taken after {deadline_s:g} s; they stay queued"
            )

    def close(self, *, clean: bool = True) -> None:
        if self._closed:
            return
        done = threading.Event()

        def end() -> None:
            self._closed = True
            self._broker.disconnect(self, clean=clean)
            done.set()

        self._ask(end)
        if not self._broker.is_current:
            done.wait(CLOSE_S)
        self._closed = True

    def emit(self, event: Event) -> None:
        """Hands an event to the listener; the broker calls this on its thread."""
        if isinstance(event, Connected):
            self._connected.set()
        if not self._closed:
            deliver_event(event, self._deliver, self.client_id)

    def _ask(self, step: Callable[[], None]) -> None:
        if not self._closed:
            self._broker.later(step)
