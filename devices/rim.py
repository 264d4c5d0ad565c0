"""What lies around a device: what can happen to it, what it asks of its runner, and how it gets its connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from devices.machine import events
from edge_fl.wire.transport import Event as TransportEvent
from edge_fl.wire.transport import Listener, Packet, Transport

Job = Callable[[], events.Event]


@dataclass(frozen=True, slots=True)
class Admitted:
    """It is this device's turn to fetch."""


Happening = TransportEvent | events.Event | Admitted


class Connect(Protocol):
    """Makes a client of a broker: `partial(MqttTransport, endpoint)`, or `partial(InMemoryTransport, broker)`."""

    def __call__(self, client_id: str, will: Packet | None, deliver: Listener, /) -> Transport: ...


class Rim(Protocol):
    """What a device needs of its runner."""

    def now_s(self) -> float:
        """A clock that only moves forward."""

    def submit(self, device: Any, job: Job) -> None:
        """Runs a job in a worker thread; its event is delivered."""

    def deliver(self, device: Any, event: Happening) -> None:
        """Lets something happen to a device; from any thread."""

    def enter(self, device: Any) -> None:
        """Asks for a turn to fetch; `Admitted` comes when there is one."""

    def leave(self) -> None:
        """Gives the turn back."""
