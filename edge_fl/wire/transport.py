"""The one seam to a broker: a transport publishes, subscribes and hands every event to one callback.

`InMemoryTransport` and `mqtt.MqttTransport` pass the same contract test. Events arrive on the transport's own thread, one at a
time; a listener puts them in a queue and returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
OCTETS = "application/octet-stream"


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


class Transport(ABC):
    """What everything above sees of a broker. Implementations differ in `publish` and `subscribe`, no more."""

    @abstractmethod
    def publish(self, packet: Packet) -> None:
        """Queues a publication; it survives a reconnect when qos is 1. Raises ProtocolError when the broker would refuse its size."""

    @abstractmethod
    def subscribe(self, pattern: str) -> None:
        """Retained messages that match come first. A second call for the same pattern sends the retained ones again."""

    @abstractmethod
    def unsubscribe(self, pattern: str) -> None:
        """Ends a subscription; messages already under way may still arrive."""

    @abstractmethod
    def drain(self, deadline_s: float) -> None:
        """Waits until the broker has taken everything published so far. Raises DeadlineError."""

    @abstractmethod
    def close(self, *, clean: bool = True) -> None:
        """Disconnects; not `clean` lets the broker publish the will, as a crash would."""
