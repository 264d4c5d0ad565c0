"""Tries a broker out, whoever started it: does it let us in, keep what it should, take what we send, and answer quickly?"""

from __future__ import annotations

import queue
import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from edge_fl.errors import DeadlineError
from edge_fl.wire.blob import CHUNK_BYTES
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import LIMITS, UNTYPED, Connected, Event, Packet

SESSION_S = 60
ROUND_TRIPS = 50
SHARED = 8
SHARED_WAIT_S = 0.2
SLOW_MS = 20.0  # an answer that waits for delayed acknowledgements takes more than 40


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what it is, what was found, what is needed, and whether that is so."""

    what: str
    found: str
    needed: str
    ok: bool


@dataclass(frozen=True)
class Party:
    """Somebody to connect as: a name, and a broker with the certificate on it, if any."""

    name: str
    endpoint: Endpoint


@dataclass(frozen=True)
class Probe:
    """A client that waits for what comes next."""

    client: MqttTransport
    events: queue.SimpleQueue[Event]
    deadline_s: float

    def packet(self) -> Packet:
        """The next packet. Raises DeadlineError."""
        while not isinstance(event := self._event(), Packet):
            pass
        return event

    def session_present(self) -> bool:
        """Whether the broker remembered us when it let us in. Raises DeadlineError."""
        while not isinstance(event := self._event(), Connected):
            pass
        return event.session_present

    def _event(self) -> Event:
        try:
            return self.events.get(timeout=self.deadline_s)
        except queue.Empty:
            raise DeadlineError(
                f"broker {self.client.endpoint}: nothing within {self.deadline_s:g} s"
            ) from None


def check(operator: Party, device: Party, fleet: str, deadline_s: float = 10.0) -> list[Finding]:
    """Tries everything that edge-fl relies on. Raises ConnectError when the broker is not there or does not let us in."""
    topic = Topics(fleet).assignment(
        device.name
    )  # of a device that does not exist, so that nobody else listens
    with probing(operator, deadline_s) as probe:
        try:
            findings = [_packet_size(probe), _retained(probe, topic), _round_trip(probe, topic)]
        finally:
            probe.client.publish(Packet(topic, b"", retain=True))
            probe.client.drain(deadline_s)
    return [
        *findings,
        _session(operator, device, topic, deadline_s),
        _shared(operator, device, topic, deadline_s),
    ]


def strangers(endpoint: Endpoint) -> tuple[Party, Party]:
    """An operator and a device for a broker that knows nobody, by names that nobody has."""
    name = f"check-{secrets.token_hex(4)}"
    return Party(f"{name}-2", endpoint), Party(name, endpoint)


def _packet_size(probe: Probe) -> Finding:
    limits = probe.client.broker_limits
    size = limits.max_packet_bytes if limits else 0
    needed = LIMITS.max_packet_bytes
    return Finding("packet size", f"{size} bytes", f"at least {needed}", size >= needed)


def _retained(probe: Probe, topic: str) -> Finding:
    chunk = secrets.token_bytes(CHUNK_BYTES)
    probe.client.publish(Packet(topic, chunk, retain=True, content_type=UNTYPED))
    probe.client.subscribe(topic)
    try:
        packet = probe.packet()
        ok = packet.retain and packet.payload == chunk
        found = "kept" if ok else "altered"
    except DeadlineError:
        ok, found = False, "not kept"
    return Finding("retained messages", found, "a chunk kept as it is", ok)


def _round_trip(probe: Probe, topic: str) -> Finding:
    """The subscription of `_retained` stands, so what is published comes back."""
    times_ms = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        probe.client.publish(Packet(topic, b"{}"))
        probe.packet()
        times_ms.append((time.perf_counter() - begin) * 1000)
    median = statistics.median(times_ms)
    return Finding(
        "round trip", f"{median:.2f} ms", f"below {SLOW_MS:g} ms (set_tcp_nodelay true)", median < SLOW_MS
    )


def _session(operator: Party, device: Party, topic: str, deadline_s: float) -> Finding:
    """A client goes away; what is published meanwhile waits for it."""
    with probing(device, deadline_s, session_expiry_s=SESSION_S) as probe:
        probe.client.subscribe(topic)
        probe.client.drain(deadline_s)
    with probing(operator, deadline_s) as probe:
        probe.client.publish(Packet(topic, b"{}"))
        probe.client.drain(deadline_s)
    with probing(device, deadline_s, clean_start=False) as probe:
        try:
            ok = probe.session_present() and probe.packet().payload == b"{}"
        except DeadlineError:
            ok = False
    return Finding("sessions", "kept" if ok else "forgotten", "a message waits for an absent client", ok)


def _shared(operator: Party, device: Party, topic: str, deadline_s: float) -> Finding:
    """Two clients share a subscription; each message reaches one of them, and one only."""
    sent = [str(number).encode() for number in range(SHARED)]
    came: list[bytes] = []
    with probing(operator, deadline_s) as one, probing(device, deadline_s) as other:
        for probe in (other, one):
            probe.client.subscribe(f"$share/check/{topic}")
            probe.client.drain(deadline_s)
        for payload in sent:
            one.client.publish(Packet(topic, payload))
        one.client.drain(deadline_s)
        until = time.monotonic() + deadline_s
        while len(came) < len(sent) and time.monotonic() < until:
            for probe in (one, other):
                with suppress(DeadlineError):
                    came.append(replace(probe, deadline_s=SHARED_WAIT_S).packet().payload)
    ok = sorted(came) == sorted(sent)
    found = "shared" if ok else f"{len(came)} of {len(sent)} messages came"
    return Finding("shared subscriptions", found, "each message to one of a group (only for --workers)", ok)


@contextmanager
def probing(
    party: Party, deadline_s: float, *, session_expiry_s: int = 0, clean_start: bool = True
) -> Iterator[Probe]:
    """A client, connected. Raises ConnectError."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client = MqttTransport(
        party.endpoint,
        party.name,
        None,
        events.put,
        session_expiry_s=session_expiry_s,
        clean_start=clean_start,
    )
    try:
        client.wait_connected(deadline_s)
        yield Probe(client, events, deadline_s)
    finally:
        client.close()
