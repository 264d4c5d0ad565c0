"""Check any broker: packet size, retained messages, round-trip time, sessions, shared subscriptions, and its access list.

Of the access list only arriving messages count: a broker may grant a subscription and never serve it, or acknowledge a publication and drop
it. That check uses two temporary devices.
"""

import queue
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from edge_fl.blob import CHUNK_BYTES
from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import LIMITS, UNTYPED, Connected, Event, Packet
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import FOLDERS, Authority

SESSION_S = 60
ROUND_TRIPS = 50
SHARED = 8
SHARED_WAIT_S = 0.2
SLOW_MS = 20.0  # an answer that waits for delayed acknowledgements takes more than 40 ms
REFUSED_S = 2.0  # a broker rejects a connection at once
LIFE = timedelta(minutes=10)  # of the temporary devices


@dataclass(frozen=True)
class BrokerCheck:
    """Result of one check: subject, what was found, what is needed, whether it passed, and whether devices require it."""

    what: str
    found: str
    needed: str
    ok: bool
    required: bool = True


@dataclass(frozen=True)
class Party:
    """A client to connect as: a name and an endpoint, with the name's certificate if needed."""

    name: str
    endpoint: Endpoint


@dataclass(frozen=True)
class Probe:
    """A connected client that collects events."""

    client: MqttTransport
    events: queue.SimpleQueue[Event]
    deadline_s: float

    def packet(self) -> Packet:
        """Wait for the next packet. Raises DeadlineError."""
        while not isinstance(event := self._event(), Packet):
            pass
        return event

    def session_present(self) -> bool:
        """Wait for the connection: whether the broker kept the session. Raises DeadlineError."""
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


def check(operator: Party, device: Party, fleet: str, deadline_s: float = 10.0) -> list[BrokerCheck]:
    """Check everything that edge-fl needs of a broker. Raises ConnectError if there is no broker or it rejects the client."""
    topic = Topics(fleet).down(device.name, "assignment")  # of no device, so that no other client receives it
    with probing(operator, deadline_s) as probe:
        try:
            results = [_packet_size(probe), _retained(probe, topic), _round_trip(probe, topic)]
        finally:
            probe.client.publish(Packet(topic, b"", retain=True))
            probe.client.drain(deadline_s)
    return [
        *results,
        _session(operator, device, topic, deadline_s),
        _shared(operator, device, topic, deadline_s),
    ]


def temporary_parties(endpoint: Endpoint) -> tuple[Party, Party]:
    """An operator and a device with unused names, for a broker without certificates."""
    name = f"check-{secrets.token_hex(4)}"
    return Party(f"{name}-2", endpoint), Party(name, endpoint)


def _packet_size(probe: Probe) -> BrokerCheck:
    limits = probe.client.broker_limits
    size = limits.max_packet_bytes if limits else 0
    needed = LIMITS.max_packet_bytes
    return BrokerCheck("packet size", f"{size} bytes", f"at least {needed}", size >= needed)


def _retained(probe: Probe, topic: str) -> BrokerCheck:
    chunk = secrets.token_bytes(CHUNK_BYTES)
    probe.client.publish(Packet(topic, chunk, retain=True, content_type=UNTYPED))
    probe.client.subscribe(topic)
    try:
        packet = probe.packet()
        ok = packet.retain and packet.payload == chunk
        found = "kept" if ok else "altered"
    except DeadlineError:
        ok, found = False, "not kept"
    return BrokerCheck("retained messages", found, "a chunk kept unaltered", ok)


def _round_trip(probe: Probe, topic: str) -> BrokerCheck:
    """Uses the subscription made by `_retained`."""
    times_ms = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        probe.client.publish(Packet(topic, b"{}"))
        probe.packet()
        times_ms.append((time.perf_counter() - begin) * 1000)
    median = statistics.median(times_ms)
    needed = f"below {SLOW_MS:g} ms in one network (set_tcp_nodelay true)"
    return BrokerCheck("round trip", f"{median:.2f} ms", needed, median < SLOW_MS, required=False)


def _session(operator: Party, device: Party, topic: str, deadline_s: float) -> BrokerCheck:
    """A message published while a client is offline must be delivered when it returns."""
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
    return BrokerCheck(
        "sessions", "kept" if ok else "forgotten", "messages are kept for an offline client", ok
    )


def _shared(operator: Party, device: Party, topic: str, deadline_s: float) -> BrokerCheck:
    """Two clients share a subscription; each message must reach exactly one of them."""
    sent = [str(number).encode() for number in range(SHARED)]
    received: list[bytes] = []
    with (
        suppress(DeadlineError),  # a broker without shared subscriptions disconnects the client
        probing(operator, deadline_s) as one,
        probing(device, deadline_s) as other,
    ):
        for probe in (other, one):
            probe.client.subscribe(f"$share/check/{topic}")
            probe.client.drain(deadline_s)
        for payload in sent:
            one.client.publish(Packet(topic, payload))
        one.client.drain(deadline_s)
        until = time.monotonic() + deadline_s
        while len(received) < len(sent) and time.monotonic() < until:
            for probe in (one, other):
                with suppress(DeadlineError):
                    received.append(replace(probe, deadline_s=SHARED_WAIT_S).packet().payload)
    ok = sorted(received) == sorted(sent)
    found = "shared" if ok else f"{len(received)} of {len(sent)} messages received"
    needed = "each message reaches one subscriber (only for --workers)"
    return BrokerCheck("shared subscriptions", found, needed, ok, required=False)


@contextmanager
def probing(
    party: Party, deadline_s: float, *, session_expiry_s: int = 0, clean_start: bool = True
) -> Iterator[Probe]:
    """Connect a client. Raises ConnectError."""
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


def full_check(home: Path, endpoint: Endpoint, fleet: str, deadline_s: float) -> list[BrokerCheck]:
    """Run `check` and `check_access`. Raises ConfigError without a CA, ConnectError when a client cannot connect."""
    register_sync.require(home)
    authority = Authority.open(home)
    operator = identity.read(home / FOLDERS["operator"])
    with tempfile.TemporaryDirectory() as folder:
        names = [f"check-{secrets.token_hex(4)}" for _ in range(2)]
        devices = authority.bake({name: Path(folder, name) for name in names}, LIFE)
        operator_party, device, other = (
            Party(client.name, client.endpoint(endpoint.host, endpoint.port))
            for client in (operator, *devices)
        )
        return [
            *check(operator_party, device, fleet, deadline_s),
            *check_access(operator_party, device, other, fleet, deadline_s),
        ]


def check_access(
    operator: Party, device: Party, other: Party, fleet: str, deadline_s: float = 10.0
) -> list[BrokerCheck]:
    """Check what `device` may publish and receive, and connections without a certificate.

    Raises ConnectError if one of the three cannot connect.
    """
    topics = Topics(fleet)
    with (
        probing(operator, deadline_s) as operator_probe,
        probing(device, deadline_s) as device_probe,
        probing(other, deadline_s),
    ):
        published = _published(operator_probe, device_probe, topics, device.name, other.name)
        received = _received(operator_probe, device_probe, topics, device.name, other.name)
    return [
        _result("device publishes on", published, {"own up"}),
        _result("device receives", received, {"own dn", "tuf"}),
        _closed(
            "without a certificate", replace(device, endpoint=replace(device.endpoint, cert=None, key=None))
        ),
        _closed(
            "in plaintext", replace(device, endpoint=replace(device.endpoint, ca=None, cert=None, key=None))
        ),
    ]


def _published(operator: Probe, device: Probe, topics: Topics, name: str, other: str) -> set[str]:
    """Families of topics on which the publications of the device `name` reach others."""
    tried = {
        "own up": topics.up(name, "log"),
        "another's up": topics.up(other, "log"),
        "own dn": topics.down(name, "cmd"),
        "another's dn": topics.down(other, "cmd"),
        "tuf": topics.tuf("999999999.root.json"),
        "art": topics.chunk("0" * 64, 0),
        "round": topics.round("check"),
        "another's claim": topics.enrol(other, "rsp"),
    }
    last = topics.up(name, "req")
    return _arriving(device, operator, tried, last, tried.values(), topics.down(name, "assignment"))


def _received(operator: Probe, device: Probe, topics: Topics, name: str, other: str) -> set[str]:
    """Families of topics that the device `name` receives when it subscribes to everything."""
    tried = {
        "another's dn": topics.down(other, "cmd"),
        "another's up": topics.up(other, "log"),
        "tuf": topics.tuf("999999999.root.json"),
        "own dn": topics.down(name, "cmd"),
    }
    patterns = ("#", f"{topics.root}/#", *tried.values())
    return _arriving(operator, device, tried, topics.down(name, "ack"), patterns, topics.up(name, "state"))


def _arriving(
    sender: Probe,
    listener: Probe,
    tried: Mapping[str, str],
    last: str,
    patterns: Iterable[str],
    listeners_topic: str,
) -> set[str]:
    """Families of `tried` that reach the listener, which subscribes to `patterns`; the permitted topic `last` ends the test.

    Brokers process packets in order: once a publication to `listeners_topic` is acknowledged, the subscriptions are active.
    """
    for pattern in (*patterns, last):
        listener.client.subscribe(pattern)
    listener.client.publish(Packet(listeners_topic, b"", expiry_s=1))
    listener.client.drain(listener.deadline_s)
    for topic in (*tried.values(), last):
        sender.client.publish(Packet(topic, b"", expiry_s=5))
    arrived: set[str] = set()
    with suppress(DeadlineError):
        while (packet := listener.packet()).topic != last:
            arrived.add(packet.topic)
    return {family for family, topic in tried.items() if topic in arrived}


def _result(what: str, found: set[str], needed: set[str]) -> BrokerCheck:
    return BrokerCheck(
        what, ", ".join(sorted(found)) or "nothing", ", ".join(sorted(needed)), found == needed
    )


def _closed(what: str, party: Party) -> BrokerCheck:
    try:
        with probing(party, REFUSED_S):
            return BrokerCheck(what, "accepted", "rejected", ok=False)
    except ConnectError:
        return BrokerCheck(what, "rejected", "rejected", ok=True)
