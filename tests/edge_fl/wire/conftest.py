"""Clients of every transport, that keep their events in order and wait for them."""

import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest

from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Connected, Disconnected, Event, Packet, Transport
from tools.chaos.faulty_transport import NO_FAULTS, FaultyTransport
from tools.memory_broker import InMemoryBroker, InMemoryTransport

WAIT_S = 60.0  # on a busy machine; every wait ends with its event
SETTLE_S = 0.2
E = TypeVar("E", Connected, Disconnected, Packet)


class Recorder:
    """A listener that records events."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.threads: set[int] = set()

    def __call__(self, event: Event) -> None:
        self.threads.add(threading.get_ident())
        self._events.put(event)

    def next(self, kind: type[E], wait_s: float = WAIT_S) -> E:
        """The next event of a kind; others before it are passed over."""
        while not isinstance(event := self._events.get(timeout=wait_s), kind):
            pass
        return event

    def payloads(self, count: int) -> list[bytes]:
        return [self.next(Packet).payload for _ in range(count)]

    def is_silent(self) -> bool:
        """Whether no packet comes for a while, for a client that can send nothing more: see `Client.hears_nothing`."""
        try:
            self.next(Packet, SETTLE_S)
        except queue.Empty:
            return True
        return False


class Client:
    """A connected transport and what it heard; `present` says whether the broker knew it."""

    def __init__(
        self, make: Callable[..., Transport], name: str, will: Packet | None, **options: Any
    ) -> None:
        self.heard = Recorder()
        self.transport = make(name, will, self.heard, **options)
        self.transport.wait_connected(WAIT_S)
        self.present = self.heard.next(Connected).session_present

    def hears_nothing(self) -> bool:
        """Whether nothing comes before a message that the client sends itself now."""
        marker = f"marker/{secrets.token_hex(8)}"
        self.transport.subscribe(marker)
        self.transport.publish(Packet(marker, b""))
        return self.heard.next(Packet).topic == marker

    def subscribe(self, *patterns: str) -> None:
        """Subscribes, and returns when the subscriptions stand: what comes from then on is heard."""
        marker = f"marker/{secrets.token_hex(8)}"
        for pattern in (*patterns, marker):
            self.transport.subscribe(pattern)
        kept = []
        self.transport.publish(Packet(marker, b""))
        while (packet := self.heard.next(Packet)).topic != marker:
            kept.append(packet)
        self.transport.unsubscribe(marker)
        for packet in kept:
            self.heard(packet)


@pytest.fixture
def recorder() -> Callable[[], Recorder]:
    return Recorder


@pytest.fixture
def topic() -> str:
    """A topic that no other test uses."""
    return f"test/{secrets.token_hex(4)}"


@pytest.fixture(
    params=["memory", "behind a link without faults", pytest.param("mqtt", marks=pytest.mark.broker)]
)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Transport]]:
    """Makes transports: `make(client_id, will, deliver, **options)`."""
    if request.param == "mqtt":
        yield partial(MqttTransport, request.getfixturevalue("mosquitto").endpoint)
        return
    broker, loop = InMemoryBroker(), MqttLoop()
    memory = partial(InMemoryTransport, broker)
    yield memory if request.param == "memory" else partial(FaultyTransport, memory, NO_FAULTS, 0, loop)
    loop.close()
    broker.close()


@pytest.fixture
def connect(make: Callable[..., Transport]) -> Iterator[Callable[..., Client]]:
    """Makes clients: `connect(will=..., session_expiry_s=...)`; they are closed at the end."""
    clients: list[Client] = []

    def connect_one(name: str = "", will: Packet | None = None, **options: Any) -> Client:
        options.setdefault("session_expiry_s", 0)
        clients.append(Client(make, name or f"c-{secrets.token_hex(6)}", will, **options))
        return clients[-1]

    yield connect_one
    for client in clients:
        client.transport.close()
