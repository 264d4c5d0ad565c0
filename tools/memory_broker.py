"""An in-process broker for tests and simulations: the part of MQTT 5 that edge-fl uses.

Wildcards, retained messages, wills, sessions that keep QoS 1 messages for an offline client, message expiry. One thread executes all
requests in order, so an event never arrives inside a call of the transport.
"""

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
    """Whether a subscription to `pattern` covers `topic`; + matches one level, a last # all following ones."""
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
    """A retained or queued packet; `until` is its expiry time on the monotonic clock."""

    packet: Packet
    until: float

    def fresh(self) -> Packet | None:
        """The packet with its remaining expiry, or None when it has expired."""
        left = self.until - time.monotonic()
        if left <= 0:
            return None
        return replace(self.packet, expiry_s=None if math.isinf(left) else math.ceil(left))


def keep(packet: Packet) -> Kept:
    """Store a packet from now on."""
    return Kept(packet, math.inf if packet.expiry_s is None else time.monotonic() + packet.expiry_s)


@dataclass
class Session:
    """Broker state of one client name; it outlives the connection unless its expiry is 0."""

    client: "InMemoryTransport | None" = None
    patterns: dict[str, int] = field(default_factory=dict)  # pattern -> QoS
    waiting: list[Kept] = field(default_factory=list)


class InMemoryBroker:
    """Sessions and retained messages. Clients are `InMemoryTransport` objects, which call the methods after `later`."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._retained: dict[str, Kept] = {}
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="edge-fl-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after all earlier requests."""
        self._steps.put(None)
        if not self.is_current:
            self._thread.join(CLOSE_S)

    def drop(self, client_id: str) -> None:
        """Cut one client's connection like a failing network: its will is published, then it reconnects."""
        self.later(lambda: self._drop(client_id))

    def forget(self) -> None:
        """Lose all retained messages and sessions, like a broker restarted without its database; all clients reconnect."""
        self.later(self._forget)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the broker's thread."""
        return threading.current_thread() is self._thread

    def later(self, step: Callable[[], None]) -> None:
        """Run `step` on the broker's thread after all earlier requests."""
        self._steps.put(step)

    def connect(self, client: "InMemoryTransport") -> None:
        """Start or resume the client's session; an older client with the same name is disconnected."""
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

    def disconnect(self, client: "InMemoryTransport", *, clean: bool) -> None:
        """End the client's connection; without `clean` its will is published."""
        session = self._sessions.get(client.client_id)
        if not session or session.client is not client:
            return
        session.client = None
        if not client.session_expiry_s:
            del self._sessions[client.client_id]
        if client.will and not clean:
            self.publish(client.will)

    def publish(self, packet: Packet) -> None:
        """Deliver the packet to all subscribed sessions; if `retain`, store it, or with an empty payload delete the stored one."""
        if packet.retain:
            if packet.payload:
                self._retained[packet.topic] = keep(packet)
            else:
                self._retained.pop(packet.topic, None)
        passed = replace(packet, retain=False)
        for session in list(self._sessions.values()):
            granted = [qos for pattern, qos in session.patterns.items() if matches(pattern, packet.topic)]
            if not granted:
                continue
            sent = replace(passed, qos=min(packet.qos, max(granted)))
            if session.client:
                session.client.emit(sent)
            elif sent.qos:
                session.waiting.append(keep(sent))

    def subscribe(self, client: "InMemoryTransport", pattern: str, qos: int) -> None:
        """Add a subscription and send the retained messages it covers, also when repeated."""
        session = self._sessions.get(client.client_id)
        if not session or session.client is not client:
            return
        session.patterns[pattern] = qos
        for topic, kept in sorted(self._retained.items()):
            if matches(pattern, topic) and (packet := kept.fresh()):
                client.emit(replace(packet, qos=min(packet.qos, qos)))

    def unsubscribe(self, client: "InMemoryTransport", pattern: str) -> None:
        """Remove a subscription."""
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
    """One client of an `InMemoryBroker`; arguments as for `MqttTransport`."""

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
        self._submit(lambda: self._broker.publish(packet))

    def subscribe(self, pattern: str, *, qos: int = 1) -> None:
        require_pattern(pattern)
        self._submit(lambda: self._broker.subscribe(self, pattern, qos))

    def unsubscribe(self, pattern: str) -> None:
        self._submit(lambda: self._broker.unsubscribe(self, pattern))

    def wait_connected(self, deadline_s: float) -> None:
        if not self._connected.wait(deadline_s):
            raise ConnectError(
                f"{self.client_id}: no answer of the in-memory broker within {deadline_s:g} s; is it closed?"
            )

    def drain(self, deadline_s: float) -> None:
        done = threading.Event()
        self._broker.later(done.set)
        if not done.wait(deadline_s):
            raise DeadlineError(
                f"{self.client_id}: publications not processed within {deadline_s:g} s", "they stay queued"
            )

    def close(self, *, clean: bool = True) -> None:
        if self._closed:
            return
        done = threading.Event()

        def end() -> None:
            self._closed = True
            self._broker.disconnect(self, clean=clean)
            done.set()

        self._submit(end)
        if not self._broker.is_current:
            done.wait(CLOSE_S)
        self._closed = True

    def emit(self, event: Event) -> None:
        """Pass an event to the listener; called on the broker's thread."""
        if isinstance(event, Connected):
            self._connected.set()
        if not self._closed:
            deliver_event(event, self._deliver, self.client_id)

    def _submit(self, step: Callable[[], None]) -> None:
        if not self._closed:
            self._broker.later(step)
