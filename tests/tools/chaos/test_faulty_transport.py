"""A faulty transport injects the faults of its profile reproducibly, and recovers after a cut."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
from msgspec.structs import replace

from edge_fl.errors import DeadlineError
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.transport import Connected, Disconnected, Event, Packet
from tools.chaos.faulty_transport import (
    NO_FAULTS,
    Faults,
    FaultyTransport,
    corrupt,
    draw_fault,
)
from tools.memory_broker import InMemoryBroker, InMemoryTransport

BORN, BACK = Connected(session_present=False), Connected(session_present=True)
WILD = Faults(drop=0.2, duplicate=0.2, reorder=0.2, corrupt=0.2, delay_s=0.02, reorder_s=0.05)


class Clients:
    """A client with a faulty connection, and one with a good connection that records what arrives."""

    def __init__(self, broker: InMemoryBroker, loop: MqttLoop, faults: Faults, seed: int = 1) -> None:
        self.events: list[Event] = []
        self.arrived: list[bytes] = []
        connect = partial(InMemoryTransport, broker)
        self.good = connect("good", None, self._receive)
        self.good.subscribe("up/#")
        self.bad = FaultyTransport(
            connect, faults, seed, loop, "bad", Packet("will", b"bye"), self.events.append
        )
        self.bad.wait_connected(60)

    def _receive(self, event: Event) -> None:
        if isinstance(event, Packet):
            self.arrived.append(event.payload)

    def send(self, count: int) -> list[bytes]:
        """Publish numbered packets and wait until all that will arrive has arrived; return the payloads."""
        sent = [b"%04d" % number for number in range(count)]
        for payload in sent:
            self.bad.publish(Packet("up/x", payload))
        self.bad.drain(60)
        self.good.drain(60)
        return sent


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    broker = InMemoryBroker()
    yield broker
    broker.close()


@pytest.fixture
def loop() -> Iterator[MqttLoop]:
    loop = MqttLoop()
    yield loop
    loop.close()


def until(claim, deadline_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    end_s = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < end_s, "did not happen"
        time.sleep(0.005)


def test_the_fault_of_each_packet_depends_only_on_the_seed() -> None:
    faults = [draw_fault(WILD, 1, "d1", "up", "rpt", number) for number in range(2000)]
    assert faults == [draw_fault(WILD, 1, "d1", "up", "rpt", number) for number in range(2000)]
    others = [
        (2, "d1", "up", "rpt"),
        (1, "d2", "up", "rpt"),
        (1, "d1", "down", "rpt"),
        (1, "d1", "up", "assignment"),
    ]
    for seed, client, direction, kind in others:
        assert faults != [draw_fault(WILD, seed, client, direction, kind, n) for n in range(2000)]  # type: ignore[arg-type]
    copies = Counter(fault.copies for fault in faults)
    assert 300 < copies[0] < 500 and 250 < copies[2] < 400
    assert 300 < sum(fault.corrupt_at is not None for fault in faults) < 500
    assert all(0 <= fault.delay_s <= WILD.delay_s for fault in faults)


@pytest.mark.parametrize(
    ("faults", "claim"),
    [
        (NO_FAULTS, lambda sent, got: got == sent),
        (Faults(drop=0.5), lambda sent, got: 10 < len(got) < 50 and got == sorted(got)),
        (Faults(duplicate=0.5), lambda sent, got: set(got) == set(sent) and 70 < len(got) < 110),
        (Faults(delay_s=0.05), lambda sent, got: got == sent),
        (Faults(reorder=0.3, reorder_s=0.1), lambda sent, got: got != sent and sorted(got) == sent),
        (Faults(corrupt=0.5), lambda sent, got: len(got) == 60 and 10 < len(set(got) & set(sent)) < 50),
    ],
    ids=["nothing", "drop", "duplicate", "delay", "reorder", "corrupt"],
)
def test_each_fault_does_what_it_is_called(broker, loop, faults: Faults, claim) -> None:  # type: ignore[no-untyped-def]
    clients = Clients(broker, loop, faults)
    sent = clients.send(60)
    assert claim(sent, clients.arrived)


def test_the_same_seed_gives_the_same_faults(broker: InMemoryBroker, loop: MqttLoop) -> None:
    faults = replace(WILD, delay_s=0.0, reorder=0.0)
    runs = []
    for seed in (1, 1, 2):
        clients = Clients(broker, loop, faults, seed)
        clients.send(80)
        runs.append(clients.arrived)
        clients.bad.close(), clients.good.close()
    assert runs[0] == runs[1] != runs[2]


def test_faults_hit_what_comes_down_too(broker: InMemoryBroker, loop: MqttLoop) -> None:
    clients = Clients(broker, loop, Faults(drop=0.5))
    clients.bad.subscribe("down/#")
    clients.send(1)  # until the subscription is made
    for number in range(60):
        clients.good.publish(Packet("down/x", b"%d" % number))
    clients.good.drain(60)
    arrived = threading.Event()
    loop.call(lambda: loop.later(0.0, arrived.set))  # after the timers of the packets, which are due already
    assert arrived.wait(60)
    assert 10 < sum(isinstance(event, Packet) for event in clients.events) < 50


def test_a_slow_connection_delays_packets(broker: InMemoryBroker, loop: MqttLoop) -> None:
    clients = Clients(broker, loop, Faults(bytes_per_s=10_000))
    began_s = time.monotonic()
    for _ in range(3):
        clients.bad.publish(Packet("up/x", b"x" * 1000))
    until(lambda: len(clients.arrived) == 3)
    assert time.monotonic() - began_s >= 0.3


def test_a_cut_connection_publishes_the_will_and_returns_with_packets_published_meanwhile(
    broker: InMemoryBroker, loop: MqttLoop
) -> None:
    clients = Clients(broker, loop, NO_FAULTS)
    clients.good.subscribe("will")
    until(lambda: any(isinstance(event, Connected) for event in clients.events))
    clients.bad.cut(0.3)
    until(lambda: any(isinstance(event, Disconnected) and not event.final for event in clients.events))
    until(lambda: b"bye" in clients.arrived)
    clients.bad.publish(Packet("up/x", b"meanwhile"))
    until(lambda: b"meanwhile" in clients.arrived)
    until(lambda: [event for event in clients.events if isinstance(event, Connected)] == [BORN, BACK])
    clients.bad.close()


def test_a_permanently_cut_connection_is_reported_and_drain_does_not_wait(
    broker: InMemoryBroker, loop: MqttLoop
) -> None:
    clients = Clients(broker, loop, NO_FAULTS)
    clients.bad.cut(float("inf"))
    until(lambda: any(isinstance(event, Disconnected) and event.final for event in clients.events))
    with pytest.raises(DeadlineError, match="bad connection"):
        clients.bad.drain(3600)


def test_exactly_one_byte_is_corrupted() -> None:
    packet = Packet("t", bytes(100))
    assert corrupt(packet, 0.5).payload == bytes(50) + b"\x55" + bytes(49)
    assert corrupt(Packet("t", b""), 0.5).payload == b""
