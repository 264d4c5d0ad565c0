"""Temporary read-only clients: read a broker's retained messages, and check whether another server is alive.

They run before the server connects: a client with the server's own name would disconnect the other server.
"""

import logging
import queue
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_fl.errors import ProtocolError
from edge_fl.wire.messages import Beat, ServerState, decode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connected, Disconnected, Event, Listener, Packet, Transport

log = logging.getLogger(__name__)

MAX_EPOCH = 2**30  # sequence numbers (`edge_fl_server.mqtt.journal`) of later epochs do not fit the registry


@dataclass(frozen=True)
class LeaseLimits:
    """Time limits and sizes of the server's connection and of readers.

    The server publishes a beat every `beat_s`; without one for `lease_s` another server may take the fleet over. Reconnecting devices
    are spread so that at most `returns_per_s` return at once.
    """

    connect_s: float = 30.0
    settle_s: float = 0.5
    read_s: float = 10.0
    drain_s: float = 10.0
    max_waiting_packets: int = 4096
    command_expiry_s: int = 60
    beat_s: float = 1.0
    lease_s: float = 5.0
    returns_per_s: float = 100.0
    max_return_s: float = 300.0


LIMITS = LeaseLimits()


class ServerConnect(Protocol):
    """Connect a client to the broker, such as `partial(MqttTransport, endpoint)` or `partial(InMemoryTransport, broker)`."""

    def __call__(
        self,
        client_id: str,
        will: Packet | None,
        deliver: Listener,
        *,
        session_expiry_s: int = ...,
        clean_start: bool = ...,
    ) -> Transport: ...


def read_retained(
    connect: ServerConnect, patterns: Sequence[str], limits: LeaseLimits = LIMITS
) -> dict[str, bytes]:
    """Read the retained messages on `patterns` -> payloads by topic. Raises ConnectError.

    A broker does not mark the end of retained messages: once it has acknowledged the subscriptions, reading ends after `settle_s`
    without one, at most after `read_s`.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    transport = _connect_reader(connect, events)
    payloads: dict[str, bytes] = {}
    try:
        transport.wait_connected(limits.connect_s)
        until, wait_s = time.monotonic() + limits.read_s, limits.read_s
        while time.monotonic() < until:
            try:
                event = events.get(timeout=wait_s)
            except queue.Empty:
                break
            match event:
                case Connected():  # also after another reader of the same name disconnected this one
                    for pattern in patterns:
                        transport.subscribe(pattern)
                    transport.drain(max(until - time.monotonic(), 0.0))  # a slow link's answer is no silence
                    wait_s = limits.settle_s
                case Disconnected():
                    wait_s = limits.read_s
                case Packet() if event.payload:
                    payloads[event.topic] = event.payload
    finally:
        transport.close()
    return payloads


def server_state(connect: ServerConnect, topics: Topics, limits: LeaseLimits) -> ServerState | None:
    """The retained state of the last server; None if there is none or it is invalid. Raises ConnectError."""
    topic = topics.server("state")
    payload = read_retained(connect, [topic], limits).get(topic)
    try:
        state = decode(payload, ServerState) if payload else None
        if state and state.epoch >= MAX_EPOCH:
            raise ProtocolError(f"epoch {state.epoch}, expected less than {MAX_EPOCH}")
        return state
    except ProtocolError as error:
        log.warning("retained srv/state: %s", error)
        return None


def online_server(connect: ServerConnect, topics: Topics, limits: LeaseLimits = LIMITS) -> str:
    """The boot id of the server that is online; "" if none is. Raises ConnectError.

    A retained "online" remains where a server and its broker ended without notice: only a beat counts.
    """
    state = server_state(connect, topics, limits)
    return state.boot if state and state.online and is_alive(connect, topics, state.boot, limits) else ""


def is_alive(connect: ServerConnect, topics: Topics, boot: str, limits: LeaseLimits) -> bool:
    """Whether the server `boot` publishes a beat within `lease_s`."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    transport = _connect_reader(connect, events)
    try:
        transport.wait_connected(limits.connect_s)
        transport.subscribe(topics.server("beat"))
        until = time.monotonic() + limits.lease_s
        while (left := until - time.monotonic()) > 0:
            try:
                event = events.get(timeout=left)
                if isinstance(event, Packet) and decode(event.payload, Beat).boot == boot:
                    return True
            except queue.Empty:
                break
            except ProtocolError as error:
                log.warning("srv/beat: %s", error)
        return False
    finally:
        transport.close()


def _connect_reader(connect: ServerConnect, events: queue.SimpleQueue[Event]) -> Transport:
    return connect(f"reader-{secrets.token_hex(4)}", None, events.put, session_expiry_s=0, clean_start=True)
