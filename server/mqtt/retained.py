"""The reader: a throw-away client that only looks, at what a broker retains and at whether a server shows that it is alive.

It comes before the server itself, which could not look under its own name: two clients of one name throw each other out.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_fl.errors import ProtocolError
from edge_fl.wire.messages import Beat, decode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connected, Disconnected, Event, Listener, Packet, Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How patient the connection is, and how many packets may wait for the receive thread.

    A server shows every `beat_s` that it is alive; one that has not for `lease_s` has lost the fleet. Devices that come back do so at
    `returns_per_s` at most.
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


class Connect(Protocol):
    """Makes a connected client: `partial(MqttTransport, endpoint)`, or `partial(InMemoryTransport, broker)`."""

    def __call__(
        self,
        client_id: str,
        will: Packet | None,
        deliver: Listener,
        *,
        session_expiry_s: int = ...,
        clean_start: bool = ...,
    ) -> Transport: ...


def read_retained(connect: Connect, patterns: Sequence[str], limits: Limits = Limits()) -> dict[str, bytes]:
    """What is retained below `patterns`, by topic, read by a throw-away client. Raises ConnectError.

    The broker does not say when it has sent everything: reading ends once `settle_s` pass without a message, after `read_s` at the latest.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    transport = _look(connect, events)
    found: dict[str, bytes] = {}
    try:
        transport.wait_connected(limits.connect_s)
        until, patience_s = time.monotonic() + limits.read_s, limits.settle_s
        while time.monotonic() < until:
            try:
                event = events.get(timeout=patience_s)
            except queue.Empty:
                break
            match event:
                case Connected():  # again, when another reader of our name has thrown us out
                    patience_s = limits.settle_s
                    for pattern in patterns:
                        transport.subscribe(pattern)
                case Disconnected():
                    patience_s = limits.read_s
                case Packet() if event.payload:
                    found[event.topic] = event.payload
    finally:
        transport.close()
    return found


def is_alive(connect: Connect, topics: Topics, boot: str, limits: Limits) -> bool:
    """Whether the server `boot` shows within `lease_s` that it is there."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    transport = _look(connect, events)
    try:
        transport.wait_connected(limits.connect_s)
        transport.subscribe(topics.server_beat())
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


def _look(connect: Connect, events: queue.SimpleQueue[Event]) -> Transport:
    return connect(f"reader-{secrets.token_hex(4)}", None, events.put, session_expiry_s=0, clean_start=True)
