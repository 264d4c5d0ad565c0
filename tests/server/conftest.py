"""A fleet in one process: an in-memory broker, the server's MQTT side, and scripted devices.

A scripted device follows the protocol of a full device, with `edge_fl.methods.contract.client.Client`, so that the server is tested without
the package `devices`. Its messages can be tampered with.
"""

import queue
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_fl.config import MethodSpec
from edge_fl.data.samples import ClientData
from edge_fl.methods.contract.client import Client
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.mqtt import connector, device_clients
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import ServerConnect
from edge_fl_server.mqtt.device_clients import DeviceClients
from edge_fl_server.mqtt.devices.assignments import Assignments
from edge_fl_server.mqtt.devices.roster import Roster
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server
from edge_fl_server.mqtt.updates.inbox import Inbox
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, ValidationConfig
from tests.server.scripted import ScriptedDevice, ScriptedHead, client_of, data_of, spec_of
from tools.memory_broker import InMemoryBroker, InMemoryTransport

# A beat in time is certain even if this process does not run for seconds.
QUICK = connector.LeaseLimits(settle_s=0.05, beat_s=0.05, lease_s=30.0)
WAIT_S = 60.0  # for what certainly comes
FAR_S = 3600.0  # a deadline that no test reaches


@dataclass(kw_only=True)
class Stage:
    """A broker and its scripted devices."""

    connect: ServerConnect
    topics: Topics = field(default_factory=lambda: Topics("main"))
    devices: list[ScriptedDevice] = field(default_factory=list)
    heads: list[ScriptedHead] = field(default_factory=list)

    def device(self, id: str, **fields: Any) -> ScriptedDevice:
        self.devices.append(ScriptedDevice(self.connect, self.topics, id, **fields))
        return self.devices[-1]

    def head(self, id: str, folder: Path, **fields: Any) -> ScriptedHead:
        self.heads.append(ScriptedHead(self.connect, self.topics, id, folder, **fields))
        return self.heads[-1]

    def spec(self, method: str, **options: Any) -> MethodSpec:
        return spec_of(method, **options)

    def client(self, id: str) -> Client:
        return client_of(id)

    def data(self, client: str, samples: int = 20) -> ClientData:
        return data_of(client, samples)

    def retained(self, pattern: str = "#") -> dict[str, bytes]:
        """The broker's retained messages, by topic without the fleet's root; the reader's own message, the last one, ends them."""
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        name = f"reader-{secrets.token_hex(4)}"
        transport = self.connect(name, None, events.put, session_expiry_s=0, clean_start=True)
        found: dict[str, bytes] = {}
        try:
            transport.wait_connected(WAIT_S)
            for wanted in (f"tests/{name}", f"{self.topics.root}/{pattern}"):
                transport.subscribe(wanted)
            transport.publish(Packet(f"tests/{name}", b"end"))
            while (event := events.get(timeout=WAIT_S)) is not None:
                if isinstance(event, Packet):
                    if event.topic == f"tests/{name}":
                        break
                    found[event.topic.removeprefix(self.topics.root + "/")] = event.payload
        finally:
            transport.close()
        return {topic: payload for topic, payload in found.items() if payload}

    @staticmethod
    def eventually(claim: Callable[[], bool], deadline_s: float = WAIT_S, every_s: float = 0.005) -> bool:
        """Whether a claim becomes true before the deadline."""
        until = time.monotonic() + deadline_s
        while not claim():
            if time.monotonic() > until:
                return False
            time.sleep(every_s)
        return True

    def close(self) -> None:
        for device in (*self.devices, *self.heads):
            device.close()
        assert not [failure for device in (*self.devices, *self.heads) for failure in device.failures]


@dataclass(kw_only=True)
class Bench(Stage):
    """A connected server, for tests of its parts."""

    server: Server

    @property
    def connection(self) -> ServerConnection:
        return self.server.connection

    @property
    def roster(self) -> Roster:
        return self.server.roster

    @property
    def inbox(self) -> Inbox:
        return self.server.inbox

    @property
    def assignments(self) -> Assignments:
        return self.server.assignments

    def fleet(
        self, spec: MethodSpec, deadline_s: float = WAIT_S, lost_s: float = 0.3, **changes: Any
    ) -> DeviceClients:
        buffer_size = int("max_staleness" in changes)  # with a buffer late updates count
        validation = {name: changes.pop(name) for name in ("max_growth", "max_weight") if name in changes}
        cohort = CohortConfig(deadline_s=deadline_s, buffer_size=buffer_size, **changes)
        recipe = Recipe(cohort=cohort, validation=ValidationConfig(**validation))
        return DeviceClients(self.server, "t1", spec, recipe, lost_s=lost_s)

    def wait_for(self, **devices: int) -> None:
        self.roster.wait_for(**devices, deadline_s=WAIT_S)


@dataclass
class RoundClock:
    """The clock of the fleet's deadlines: it is ahead by `passed()` of them."""

    passed: Callable[[], int] = lambda: 0

    def monotonic(self) -> float:
        return time.monotonic() + FAR_S * self.passed()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> RoundClock:
    clock = RoundClock()
    monkeypatch.setattr(device_clients, "time", clock)
    return clock


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    broker = InMemoryBroker()
    yield broker
    broker.close()


@pytest.fixture
def stage(broker: InMemoryBroker) -> Iterator[Stage]:
    stage = Stage(connect=partial(InMemoryTransport, broker))
    yield stage
    stage.close()


def _bench(connect: ServerConnect, fleet: str) -> Iterator[Bench]:
    with Journal(fleet=fleet) as journal:
        connection = ServerConnection(connect, journal, limits=QUICK)
        bench = Bench(connect=connect, topics=connection.topics, server=Server.of(connection))
        connection.open()
        journal.begin(connection.epoch)
        yield bench
        connection.close()
        bench.close()


@pytest.fixture
def bench(broker: InMemoryBroker) -> Iterator[Bench]:
    yield from _bench(partial(InMemoryTransport, broker), "main")


@pytest.fixture
def own_mosquitto(mosquitto_program: Program, tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker that a test may kill and restart."""
    with Mosquitto(BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker:
        yield broker


@pytest.fixture
def real_bench(own_mosquitto: Mosquitto) -> Iterator[Bench]:
    yield from _bench(partial(MqttTransport, own_mosquitto.endpoint), "main")
