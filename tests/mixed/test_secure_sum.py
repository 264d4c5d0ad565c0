"""Secure sums between the real server and real agents over a broker: masked, plain, with drop-outs, and what the broker sees."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl.errors import ConfigError, SecureSumError
from edge_fl.secure import fixed_point
from edge_fl.seeds import generator
from edge_fl.wire import identity
from edge_fl.wire.messages import MESSAGES, Capability, SumReply, SumRequest, decode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import Settings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices.agent.effects import Job
from edge_fl_devices.agent.events import Event, Failed
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.runtime.device import Device, start
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.worker import Worker
from edge_fl_server.mqtt.connector import connector
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.mqtt.updates.secure_sums import SecureSums, SumOptions
from tests.memory_broker import InMemoryBroker, InMemoryTransport

TOPICS = Topics("main")
QUICK = AgentLimits(settle_s=0.05, return_s=0.1)
Vector = NDArray[np.float64]


@dataclass(eq=False)
class Offering(Worker):
    """A worker that has one vector to offer. `before` runs in the worker thread before it is offered."""

    vector: Vector | None = None
    before: Callable[[], None] = lambda: None
    known: list[int] = field(default_factory=list)

    def perform(self, job: Job, material: Any) -> Event:
        return Failed("unsupported_tier", final=True)

    def offer(self, request: SumRequest) -> Vector | None:
        self.before()
        return self.vector

    def summed(self, request: SumRequest) -> None:
        self.known.append(request.release)


@dataclass
class Fleet:
    """A server and devices at a broker; `packets`: everything that the broker passed on."""

    folder: Path
    connect: Any
    connect_server: Any
    identities: Path | None
    packets: list[Packet] = field(default_factory=list)
    devices: dict[str, Device] = field(default_factory=dict)
    workers: dict[str, Offering] = field(default_factory=dict)

    @contextmanager
    def running(self, vectors: Mapping[str, Vector | None]) -> Iterator[tuple[Server, SecureSums, Runner]]:
        runner = Runner(workers=4)
        for name, vector in vectors.items():
            self.workers[name] = Offering(name, Store(self.folder / name), vector=vector)
            folder = self.identities / name if self.identities else None
            can = Capability("head", "test", "3")
            self.devices[name] = start(name, TOPICS, can, self.workers[name], limits=QUICK, identity=folder)
        ca = (
            (self.identities / next(iter(vectors)) / identity.CA_FILE).read_bytes()
            if self.identities
            else None
        )
        with Journal() as journal, connected(self.connect_server, journal) as server:
            for device in self.devices.values():
                runner.add(device, self.connect)
            thread = threading.Thread(target=partial(runner.run, deadline_s=110), daemon=True)
            thread.start()
            try:
                server.roster.wait_for(heads=len(vectors), deadline_s=30)
                yield server, SecureSums(server, ca), runner
            finally:
                runner.stop()
                thread.join(30)


def vectors_of(count: int, length: int) -> dict[str, Vector]:
    rng = generator(5, "secure sum")
    return {f"pi-{number:02}": rng.normal(size=length) * 100 for number in range(count)}


@contextmanager
def recorded(connect: Any, packets: list[Packet]) -> Iterator[None]:
    """Record everything below the fleet's root."""
    transport = connect(
        "sniffer", None, lambda event: packets.append(event) if isinstance(event, Packet) else None
    )
    transport.wait_connected(10)
    transport.subscribe(f"{TOPICS.root}/#")
    transport.drain(10)
    yield
    transport.close()


@contextmanager
def in_memory(folder: Path, names: Any = ()) -> Iterator[Fleet]:
    """An in-memory broker; with `names` their devices have certificates."""
    if names:
        Authority.make(folder / "home").bake({name: folder / "ids" / name for name in names})
    broker = InMemoryBroker()
    connect = partial(InMemoryTransport, broker)
    fleet = Fleet(folder, connect, connect, folder / "ids" if names else None)
    with recorded(connect, fleet.packets):
        yield fleet
    broker.close()


def test_masked_and_plain_sums_of_thirty_devices_agree(tmp_path: Path) -> None:
    vectors = vectors_of(30, 33_000)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with in_memory(tmp_path / "a", vectors) as fleet, fleet.running(vectors) as (_, sums, _):
        masked = sums.collect("statistics", 7, 33_000)
        assert all(worker.known == [7] for worker in fleet.workers.values())
        largest = max(len(packet.payload) for packet in fleet.packets)
        sent = sum(len(packet.payload) for packet in fleet.packets if "/pi-00/up/sum/" in packet.topic)
    with in_memory(tmp_path / "b") as fleet, fleet.running(vectors) as (_, sums, _):
        plain = sums.collect("statistics", 7, 33_000, SumOptions(masked=False))
    assert masked.devices == plain.devices == tuple(vectors)
    assert np.abs(masked.vector - plain.vector).max() <= 1e-6
    assert np.abs(masked.vector - sum(vectors.values())).max() <= 1e-6
    assert sent == 33_000 * fixed_point.BYTES <= 200_000
    assert largest <= 64 * 1024
