"""Interfaces between a device, the runner that drives it, and its connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edge_fl.failures import Failure
from edge_fl.fleet.settings import SettingsStatus
from edge_fl.release.agent import AgentUpdate
from edge_fl.wire.transport import Event as TransportEvent
from edge_fl.wire.transport import Listener, Packet, Transport
from edge_fl_devices.agent import events
from edge_fl_devices.remote.answering import QueryAnswered
from edge_fl_devices.runtime.signatures import KeysRefreshed
from edge_fl_devices.workers.secure_sums import SumAnswered


@dataclass(frozen=True, slots=True)
class MayFetch:
    """The device's turn to fetch."""


DeviceEvent = TransportEvent | events.Event | MayFetch | SumAnswered | KeysRefreshed | QueryAnswered
RunnerJob = Callable[[], DeviceEvent]


TakeSettings = Callable[[events.Received], SettingsStatus]
"""Takes a message with settings from the operator; returns the settings in effect."""
DesireUpdate = Callable[[AgentUpdate | None], None]
"""Takes the agent release that the server desires, None for none."""
DeviceConnect = Callable[[str, Packet | None, Listener], Transport]
"""Connects the client of this id, with its will, to a broker, such as `partial(MqttTransport, endpoint)`."""


def fixed_settings(received: events.Received) -> SettingsStatus:
    """Take no settings: those of a simulated device are its fleet's."""
    return SettingsStatus(why=Failure.FIXED)


def no_updates(update: AgentUpdate | None) -> None:
    """Pursue no updates of the agent: it runs without the launcher."""


class Scheduler(Protocol):
    """What a device requires of its runner; see `edge_fl_devices.runtime.runner.Runner`."""

    def now_s(self) -> float: ...

    def submit(self, device: Any, job: RunnerJob) -> None: ...

    def deliver(self, device: Any, event: DeviceEvent) -> None: ...

    def request_fetch(self, device: Any) -> None: ...

    def end_fetch(self) -> None: ...
