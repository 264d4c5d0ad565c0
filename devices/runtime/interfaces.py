"""Between a device and the runner that drives it: the events of a device, what it asks of its runner, and how it gets its connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from devices.agent import events
from edge_fl.wire.transport import Event as TransportEvent
from edge_fl.wire.transport import Listener, Packet, Transport

Job = Callable[[], events.Event]


@dataclass(frozen=True, slots=True)
class MayFetch:
    """It is this device's turn to fetch."""


DeviceEvent = TransportEvent | events.Event | MayFetch


class DeviceConnect(Protocol):
    """Makes a client of a broker: `partial(MqttTransport, endpoint)`, or `partial(InMemoryTransport, broker)`."""

    def __call__(self, client_id: str, will: Packet | None, deliver: Listener, /) -> Transport: ...


class Scheduler(Protocol):
    """What a device asks of its runner: the time, worker threads, and a turn to fetch."""

    def now_s(self) -> float:
        """A clock that only moves forward."""

    def submit(self, device: Any, job: Job) -> None:
        """Runs a job in a worker thread; its event is delivered."""

    def deliver(self, device: Any, event: DeviceEvent) -> None:
        """Lets something happen to a device; from any thread."""

    def request_fetch(self, device: Any) -> None:
        """Asks for a turn to fetch; `MayFetch` comes when there is one."""

    def end_fetch(self) -> None:
        """Gives the turn back."""
