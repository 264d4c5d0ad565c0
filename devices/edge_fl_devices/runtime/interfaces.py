"""Interfaces between a device, the runner that drives it, and its connection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edge_fl.failures import Failure
from edge_fl.fleet.settings import SettingsStatus
from edge_fl.release.agent import AgentUpdate
from edge_fl.wire.transport import Event, Listener, Packet, Transport
from edge_fl_devices.agent import events
from edge_fl_devices.remote.answering import AnswerQuery, QueryAnswered, decline
from edge_fl_devices.runtime.signatures import KeysRefreshed
from edge_fl_devices.workers.secure_sums import SumAnswered


@dataclass(frozen=True, slots=True)
class MayFetch:
    """The device's turn to fetch."""


DeviceEvent = Event | events.Event | MayFetch | SumAnswered | KeysRefreshed | QueryAnswered
RunnerJob = Callable[[], DeviceEvent]


DeviceConnect = Callable[[str, Packet | None, Listener], Transport]
"""Connects the client of this id, with its will, to a broker, such as `partial(MqttTransport, endpoint)`."""


@dataclass(frozen=True)
class Services:
    """What a device does for its operator besides assignments; by default nothing, as a simulated one.

    take_settings: takes a message with settings, and returns those in effect. desire_update: takes the agent release that the server
    desires, None for none.
    """

    answer_query: AnswerQuery = decline
    take_settings: Callable[[events.Received], SettingsStatus] = lambda received: SettingsStatus(
        why=Failure.FIXED
    )
    desire_update: Callable[[AgentUpdate | None], None] = lambda update: None


SIMULATED = Services()


class Scheduler(Protocol):
    """What a device requires of its runner; see `edge_fl_devices.runtime.runner.Runner`."""

    def now_s(self) -> float: ...

    def submit(self, device: Any, job: RunnerJob) -> None: ...

    def deliver(self, device: Any, event: DeviceEvent) -> None: ...

    def request_fetch(self, device: Any) -> None: ...

    def end_fetch(self) -> None: ...
