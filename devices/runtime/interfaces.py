"""Interfaces between a device, the runner that drives it, and its connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from devices.agent import events
from edge_fl.wire.transport import Event as TransportEvent
from edge_fl.wire.transport import Listener, Packet, Transport

RunnerJob = Callable[[], events.Event]


@dataclass(frozen=True, slots=True)
class MayFetch:
    """The device's turn to fetch."""


DeviceEvent = TransportEvent | events.Event | MayFetch


class DeviceConnect(Protocol):
    """Connects a client to a broker, such as `partial(MqttTransport, endpoint)`."""

    def __call__(self, client_id: str, will: Packet | None, deliver: Listener, /) -> Transport: ...


class Scheduler(Protocol):
    """What a device requires of its runner."""

    def now_s(self) -> float:
        """Return a monotonic time."""

    def submit(self, device: Any, job: RunnerJob) -> None:
        """Run a job in a worker thread and deliver its event."""

    def deliver(self, device: Any, event: DeviceEvent) -> None:
        """Queue an event for a device; from any thread."""

    def request_fetch(self, device: Any) -> None:
        """Deliver `MayFetch` as soon as few enough devices are fetching."""

    def end_fetch(self) -> None:
        """Free the device's fetch slot."""
