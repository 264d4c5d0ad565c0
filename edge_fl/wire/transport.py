"""The one seam to a broker: a transport publishes, subscribes and hands every event to one callback.

`memory.InMemoryTransport` and `mqtt.MqttTransport` pass the same contract test. Events arrive on the transport's own thread, one at
a time and never inside a call of ours; a listener puts them in a queue and returns. A listener that raises is logged, nothing more.
After `close` no event arrives and every call does nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from edge_fl.errors import ProtocolError

log = logging.getLogger(__name__)

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
UNTYPED = ""  # a chunk of a blob: what the whole is stands in its descriptor


@dataclass(frozen=True)
class Limits:
    """What a transport holds itself to, whatever the broker allows.

    `max_inflight` publications are sent before the first is acknowledged, `receive_maximum` come in likewise; `max_queued_bytes` wait
    for a connection. An attempt to connect ends after `connect_timeout_s`; the pause before the next is drawn from 0 to a bound that
    doubles from `min_retry_s` to `max_retry_s`, and starts anew once a connection has lasted `stable_s`.
    """

    max_packet_bytes: int = 300_000
    max_inflight: int = 20
    max_queued_bytes: int = 1024 * 1024 * 1024
    receive_maximum: int = 64
    connect_timeout_s: float = 5.0
    min_retry_s: float = 0.2
    max_retry_s: float = 15.0
    stable_s: float = 10.0


LIMITS = Limits()


@dataclass(frozen=True)
class Packet:
    """One publication. `retain` on arrival says that the broker had kept it; `expiry_s` is MQTT 5's message expiry."""

    topic: str
    payload: bytes
    retain: bool = False
    qos: int = 1
    content_type: str = JSON
    expiry_s: int | None = None


@dataclass(frozen=True)
class Connected:
    """The broker accepted us; `session_present` False means that subscriptions must be made again."""

    session_present: bool


@dataclass(frozen=True)
class Disconnected:
    """The connection is gone; the transport is already trying again unless `final`."""

    reason: str
    final: bool = False


Event = Connected | Disconnected | Packet
Listener = Callable[[Event], None]
"""Called on the transport's own thread, maybe before the constructor of the transport has returned."""


class Transport(ABC):
    """What everything above sees of a broker. Implementations differ in `publish` and `subscribe`, no more."""

    @abstractmethod
    def publish(self, packet: Packet) -> None:
        """Queues a publication; it survives a reconnect when qos is 1. Raises ProtocolError when the broker would refuse its size."""

    @abstractmethod
    def subscribe(self, pattern: str, *, qos: int = 1) -> None:
        """Retained messages that match come first. A second call for the same pattern sends the retained ones again.

        With `qos` 0 the broker keeps no account of what it sends: for what the owner counts, verifies and asks for again itself.
        """

    @abstractmethod
    def unsubscribe(self, pattern: str) -> None:
        """Ends a subscription; messages already under way may still arrive."""

    def spread(self, over_s: float) -> None:
        """Comes back at a random moment of the first `over_s` after a lost connection, as a fleet that is no stampede would."""
        return

    @abstractmethod
    def wait_connected(self, deadline_s: float) -> None:
        """Waits until the broker accepts us. Raises ConnectError that says what was tried; the transport keeps trying."""

    @abstractmethod
    def drain(self, deadline_s: float) -> None:
        """Waits until the broker has taken everything published so far. Raises DeadlineError."""

    @abstractmethod
    def close(self, *, clean: bool = True) -> None:
        """Disconnects; not `clean` lets the broker publish the will, as a crash would."""


PACKET_OVERHEAD_BYTES = 64  # MQTT's own fields beside topic, content type and payload


def require_sendable(packet: Packet, max_packet_bytes: int) -> None:
    """Raises ProtocolError for a topic with a wildcard, or a packet that the broker would answer by closing the connection."""
    if not packet.topic or "+" in packet.topic or "#" in packet.topic:
        raise ProtocolError(
            f"topic {packet.topic!r}: expected one without wildcards", consequence="nothing was sent"
        )
    size = len(packet.topic.encode()) + len(packet.content_type) + len(packet.payload) + PACKET_OVERHEAD_BYTES
    if size > max_packet_bytes:
        raise ProtocolError(
            f"{packet.topic}: packet of {size} bytes, the broker takes {max_packet_bytes}",
            consequence="nothing was sent",
        )


def require_pattern(pattern: str) -> None:
    """Raises ProtocolError for a subscription that MQTT does not know: + and # stand alone in their level, # in the last."""
    levels = pattern.split("/")
    alone = all(level in ("+", "#") or not {"+", "#"} & set(level) for level in levels)
    if not pattern or not alone or "#" in levels[:-1]:
        raise ProtocolError(
            f"subscription {pattern!r}: expected + or # alone in a level, # only in the last",
            consequence="not subscribed",
        )


def hand_over(event: Event, deliver: Listener, client_id: str) -> None:
    """Calls the listener; what it raises is logged and goes no further, so that one bad message never stops the next."""
    try:
        deliver(event)
    except Exception:
        log.exception("%s: the listener failed on %s; the next event follows", client_id, _brief(event))


def _brief(event: Event) -> str:
    return f"{len(event.payload)} bytes on {event.topic}" if isinstance(event, Packet) else repr(event)
