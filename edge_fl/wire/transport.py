"""The interface to a broker: a transport publishes, subscribes and delivers every event to one callback.

All implementations pass the same contract test. Events arrive one at a time on the transport's own thread and never inside a call to it; a
listener puts them in a queue and returns. An exception of a listener is logged. After `close` no event arrives and calls do nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edge_fl.blob import CHUNK_BYTES, split
from edge_fl.errors import ProtocolError

log = logging.getLogger(__name__)

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
UNTYPED = ""  # a chunk of a blob; the blob's descriptor gives its type


@dataclass(frozen=True)
class TransportLimits:
    """Limits of a transport, in addition to the broker's.

    `max_inflight` unacknowledged publications are sent, `receive_maximum` received; `max_queued_bytes` wait for a connection. An attempt to
    connect ends after `connect_timeout_s`. The pause before the next is drawn from 0 to a bound that doubles from `min_retry_s` to
    `max_retry_s` and is reset after a connection of `stable_s`.
    """

    max_packet_bytes: int = 300_000
    max_inflight: int = 20
    max_queued_bytes: int = 1024 * 1024 * 1024
    receive_maximum: int = 64
    connect_timeout_s: float = 5.0
    min_retry_s: float = 0.2
    max_retry_s: float = 15.0
    stable_s: float = 10.0


LIMITS = TransportLimits()


@dataclass(frozen=True)
class Packet:
    """One publication. `retain` on arrival: the broker had retained it. `expiry_s` is MQTT 5's message expiry."""

    topic: str
    payload: bytes
    retain: bool = False
    qos: int = 1
    content_type: str = JSON
    expiry_s: int | None = None


def chunk_packets(
    topic: Callable[[int], str],
    payload: bytes,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    content_type: str = UNTYPED,
    expiry_s: int | None = None,
) -> Iterator[Packet]:
    """Yield the chunks of a payload on the topics of their indices."""
    for index, chunk in enumerate(split(payload, chunk_bytes)):
        yield Packet(topic(index), bytes(chunk), content_type=content_type, expiry_s=expiry_s)


@dataclass(frozen=True)
class Connected:
    """The broker accepted the client; without `session_present` subscriptions must be made again."""

    session_present: bool


@dataclass(frozen=True)
class Disconnected:
    """The connection ended; the transport reconnects unless `final`, and its owner says so. planned: somebody ended it on purpose."""

    reason: str
    final: bool = False
    planned: bool = False

    def __str__(self) -> str:
        return f"{self.reason} (planned)" if self.planned else self.reason


Event = Connected | Disconnected | Packet
Listener = Callable[[Event], None]
"""Called on the transport's own thread, possibly before the transport's constructor has returned."""


class Transport(ABC):
    """Interface of all transports. The tests' in-memory transport and `mqtt.transport.MqttTransport` implement it."""

    @abstractmethod
    def publish(self, packet: Packet) -> None:
        """Queue a publication; with qos 1 it survives a reconnect. Raises ProtocolError for a packet larger than the broker accepts."""

    @abstractmethod
    def subscribe(self, pattern: str, *, qos: int = 1) -> None:
        """Subscribe; retained messages that match arrive first. Subscribing again to the same pattern sends the retained ones again.

        With `qos` 0 the broker tracks no deliveries: for messages that the receiver verifies and requests again itself.
        """

    @abstractmethod
    def unsubscribe(self, pattern: str) -> None:
        """End a subscription; messages already sent may still arrive."""

    def spread(self, over_s: float) -> None:
        """After a lost connection reconnect at a random moment within `over_s`, so that clients do not reconnect all at once."""
        return

    @abstractmethod
    def wait_connected(self, deadline_s: float) -> None:
        """Wait for the broker to accept the client. Raises ConnectError that says what was tried; the transport keeps trying."""

    @abstractmethod
    def drain(self, deadline_s: float) -> None:
        """Wait until the broker has acknowledged everything published and subscribed so far. Raises DeadlineError."""

    @abstractmethod
    def close(self, *, clean: bool = True) -> None:
        """Disconnect; without `clean` the broker publishes the will, as after a crash."""


PACKET_OVERHEAD_BYTES = 64  # MQTT's own fields, in addition to topic, content type and payload


def require_sendable(packet: Packet, max_packet_bytes: int) -> None:
    """Raise ProtocolError for a topic with a wildcard, or a packet for which the broker would close the connection."""
    if not packet.topic or "+" in packet.topic or "#" in packet.topic:
        raise ProtocolError(
            f"topic {packet.topic!r}: expected one without wildcards", consequence="nothing was sent"
        )
    size = len(packet.topic.encode()) + len(packet.content_type) + len(packet.payload) + PACKET_OVERHEAD_BYTES
    if size > max_packet_bytes:
        raise ProtocolError(
            f"{packet.topic}: packet of {size} bytes, the broker accepts {max_packet_bytes}",
            consequence="nothing was sent",
        )


def require_pattern(pattern: str) -> None:
    """Raise ProtocolError for an invalid subscription: + and # must be alone in their level, # only in the last."""
    levels = pattern.split("/")
    alone = all(level in ("+", "#") or not {"+", "#"} & set(level) for level in levels)
    if not pattern or not alone or "#" in levels[:-1]:
        raise ProtocolError(
            f"subscription {pattern!r}: expected + or # alone in a level, # only in the last",
            consequence="not subscribed",
        )


def deliver_event(event: Event, deliver: Listener, client_id: str) -> None:
    """Call the listener; log an exception and continue with the next event."""
    try:
        deliver(event)
    except Exception:
        what = f"{len(event.payload)} bytes on {event.topic}" if isinstance(event, Packet) else repr(event)
        log.exception("%s: the listener failed on %s; continuing with the next event", client_id, what)


Connect = Callable[[str, Packet | None, Listener], Transport]
"""Connects the client of this name, with its will, to a broker."""
