"""A device and a server receive mutated messages and still answer valid ones afterwards."""

import json
import logging
import queue
import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.errors import ProtocolError
from edge_fl.failures import Failure
from edge_fl.inputs import InputSpec
from edge_fl.wire import topics
from edge_fl.wire.messages import MESSAGES, Assignment, Capability, DeviceState, Log, ServerState, encode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import JSON, SAFETENSORS, Connected, Packet
from edge_fl_devices.agent.effects import Job
from edge_fl_devices.agent.events import Event, Failed
from edge_fl_devices.runtime import device as devices
from edge_fl_devices.runtime.device import Device, DeviceEvent
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.worker import Worker
from edge_fl_server.mqtt import connector
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.devices.assignments import Assignments
from edge_fl_server.mqtt.devices.roster import Roster
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.updates.inbox import Inbox, RoundRequest
from edge_fl_server.mqtt.updates.validation import Expected, UpdateTerms, Validator
from tests.fuzz.mutate import mutated_text, mutated_trees, to_json
from tests.fuzz.valid import structs
from tools.memory_broker import InMemoryBroker, InMemoryTransport

SPEC = MethodSpec(ModelConfig(), InputSpec((1, 8, 8)), ["a", "b"], MethodConfig(), 0)
TOPICS = Topics("main")
DOWN = {
    "server_state": TOPICS.server("state"),
    "round": TOPICS.round("t"),
    **{kind: TOPICS.down("d1", kind) for kind in topics.DOWN},
}
UP = {"rpt": TOPICS.up("d1", "rpt", "t", 1)} | {
    kind + "_reply" if kind in topics.DOWN else kind: TOPICS.up("d1", kind)
    for kind in topics.UP
    if kind not in topics.REPORTS
}
CLONED = "two machines have its identity"  # logged as an error on purpose: alternating boot ids
LONG = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class IdleScheduler:
    """A scheduler whose jobs never finish."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def submit(self, device: Any, job: Any) -> None: ...

    def deliver(self, device: Any, event: DeviceEvent) -> None: ...

    def request_fetch(self, device: Any) -> None: ...

    def end_fetch(self) -> None: ...


class Idle(Worker):
    def perform(self, job: Job, material: Any) -> Event:
        return Failed(Failure.ERROR)


def packets(kinds: dict[str, str]) -> st.SearchStrategy[Packet]:
    """Messages of some kinds on their topics, most of them mutated."""
    return st.sampled_from(sorted(kinds)).flatmap(
        lambda kind: st.builds(Packet, st.just(kinds[kind]), _payload(kind), st.booleans())
    )


@st.composite
def _payload(draw: st.DrawFn, kind: str) -> bytes:
    tree = json.loads(msgspec.json.encode(draw(structs(MESSAGES[kind]))))
    if draw(st.integers(0, 3)):
        tree = draw(mutated_trees(tree))
    return draw(mutated_text(to_json(tree)))


@given(received=st.lists(packets(DOWN), max_size=4))
@pytest.mark.parametrize("tier", ["head", "full"])
def test_a_device_survives_any_message(tier: str, received: list[Packet]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _receive_all(tier, received, Store(Path(folder)))


def _receive_all(tier: Any, received: list[Packet], store: Store) -> None:
    """Receives the packets, then the messages of a newly started server."""
    scheduler, broker = IdleScheduler(), _NullTransport()
    alive = Device("d1", TOPICS, Capability(tier, "test", "3"), Idle("d1", store))
    alive.connect(lambda *_: broker, scheduler)  # type: ignore[arg-type, return-value]
    _handle(alive, scheduler, Connected(False))
    for packet in received:
        _handle(alive, scheduler, packet)
    server = ServerState(True, secrets.token_hex(8))
    for message, topic in (
        (server, DOWN["server_state"]),
        (Assignment(1, "rest", why="tired"), DOWN["assignment"]),
    ):
        _handle(alive, scheduler, Packet(topic, encode(message)))
    assert alive.state.assignment and alive.state.assignment.why == "tired"


def _handle(alive: Device, scheduler: IdleScheduler, event: DeviceEvent) -> None:
    """Handle an event, then tick until the device requests no more time."""
    alive.handle(event)
    for _ in range(3):
        scheduler.time_s = min(max(scheduler.time_s, alive.wake_s), scheduler.time_s + 50.0)
        alive.handle(devices.events.Tick())


class _NullTransport:
    """A transport that discards everything."""

    def __init__(self) -> None:
        self.publish = self.subscribe = self.unsubscribe = self.spread = lambda *_, **__: None


@pytest.fixture
def server() -> Iterator[tuple[ServerConnection, InMemoryTransport, queue.SimpleQueue[str]]]:
    """A server with an open round request, a device's connection to it, and the log lines it receives."""
    broker = InMemoryBroker()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Journal(fleet="main", quarantine_after=0) as journal:
        connection = ServerConnection(
            partial(InMemoryTransport, broker), journal, limits=connector.LeaseLimits(settle_s=0.02)
        )
        inbox, _, _ = Inbox(connection), Roster(connection), Assignments(connection)
        connection.on(
            "log", lambda event: lines.put(event.message.text) if isinstance(event.message, Log) else None
        )
        connection.open()
        expected = Expected({}, frozenset(), frozenset(), 4096)
        inbox.open(
            RoundRequest("t-1-0", "t", 1, "train", ["d1"], Validator(expected)), UpdateTerms(SPEC, {}, 0.0)
        )
        yield connection, InMemoryTransport(broker, "d1", None, lambda event: None), lines
        connection.close()
    broker.close()


BLOBS = st.builds(
    lambda index, payload, kind: Packet(TOPICS.up("d1", "blob", "t-1-0", index), payload, content_type=kind),
    st.integers(0, 5),
    st.binary(min_size=1, max_size=2000),
    st.sampled_from([SAFETENSORS, SAFETENSORS, JSON]),
)


@LONG
@given(
    received=st.lists(st.one_of(packets(UP), packets(UP), BLOBS), max_size=4), number=st.integers(0, 2**30)
)
def test_a_server_survives_any_message(
    server: tuple[ServerConnection, InMemoryTransport, queue.SimpleQueue[str]],
    received: list[Packet],
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection, device, lines = server
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        for packet in received:
            with suppress(ProtocolError):  # larger than the broker's limit: never delivered
                device.publish(packet)
        device.publish(Packet(UP["log"], encode(Log("info", f"still there? {number}"))))
        while lines.get(timeout=60) != f"still there? {number}":
            pass
    output = [record.getMessage() for record in caplog.records]
    assert not [line for line in output if CLONED not in line]
    connection.check()
    assert "edge-fl-server" in {thread.name for thread in threading.enumerate()}


def test_a_device_with_valid_messages_is_known(
    server: tuple[ServerConnection, InMemoryTransport, queue.SimpleQueue[str]],
) -> None:
    """Check of the set-up above: valid messages get through."""
    connection, device, lines = server
    device.publish(Packet(UP["state"], encode(DeviceState("ready", "b1"))))
    device.publish(Packet(UP["log"], encode(Log("info", "hello"))))
    assert lines.get(timeout=60) == "hello" and not connection.malformed
