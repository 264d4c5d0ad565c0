"""A device of a runner: packets become events of its agent, and the agent's effects become calls.

A device has no thread of its own. Its runner, which it knows as a `Scheduler`, delivers events, keeps the time and runs its jobs; results
come back through the runner's queue.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from edge_fl.blob import digest
from edge_fl.console.progress import Count
from edge_fl.errors import EdgeFLError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.fleet.remote_settings import SettingsStatus
from edge_fl.release.agent import AgentUpdate
from edge_fl.secure import floors
from edge_fl.secure.floors import SumFloors
from edge_fl.wire.messages import MESSAGES, Ack, Capability, SumStep
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import Connect, Connected, Disconnected, Event, Packet
from edge_fl_devices.agent import effects, events, outbox, state
from edge_fl_devices.agent.state import AgentLimits, AgentState, Phase
from edge_fl_devices.agent.step import step, will
from edge_fl_devices.install import fetch
from edge_fl_devices.install.fetch import FetchLimits
from edge_fl_devices.remote.answering import AnswerQuery, QueryAnswered, decline
from edge_fl_devices.runtime.connection import Connection, Reporting
from edge_fl_devices.runtime.fetching import Fetching, ReceivedBroadcasts
from edge_fl_devices.runtime.signatures import KeysRefreshed, StatementSigner, Verifier
from edge_fl_devices.workers.secure_sums import SumAnswered, SumParticipant
from edge_fl_devices.workers.worker import Worker, attempt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MayFetch:
    """The device's turn to fetch."""


DeviceEvent = Event | events.Event | MayFetch | SumAnswered | KeysRefreshed | QueryAnswered
RunnerJob = Callable[[], DeviceEvent]


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


class Device:
    """The agent of one device with its worker, connection and fetches.

    It has a new boot id, and the memory, reports and releases of its worker's store. data_problem: the failure word if its data could not
    be read. identity: the folder with its certificate. sum_floors: the least protection with which it takes part in secure sums. crashed:
    it ignores all events.
    """

    def __init__(
        self,
        name: str,
        topics: Topics,
        capability: Capability,
        worker: Worker,
        *,
        limits: AgentLimits = state.LIMITS,
        fetching: FetchLimits = fetch.LIMITS,
        data_problem: str = "",
        identity: Path | None = None,
        services: Services = SIMULATED,
        sum_floors: SumFloors = floors.DEFAULT,
    ) -> None:
        release, store, now_s = worker.boot(), worker.store, time.monotonic()
        self.worker, self.crashed = worker, False
        self.state = AgentState(
            device=name,
            boot=secrets.token_hex(8),
            topics=topics,
            capability=capability,
            limits=limits,
            memory=store.begin() if identity else store.memory(),
            outbox=outbox.restored(store.outbox(), now_s),
            release=release,
            installed=worker.installed(),
            alone_at_s=now_s + limits.offline_s,
            data_problem=data_problem,
        )
        signer = StatementSigner(topics.fleet, name, identity, self.state.memory.starts)
        self.connection = Connection(name, topics, signer)
        self.reporting = Reporting(name, topics, store, signer)
        self._fetch_limits, self._services = fetching, services
        self._broadcasts = ReceivedBroadcasts()
        self._timestamp = ""  # hash of the last one
        self._verifier = Verifier(topics.fleet, name, worker.verifies)
        self._sums = SumParticipant(
            name, topics.fleet, identity, worker, store, sum_floors, lambda: not self.state.over_budget
        )
        self._scheduler: Scheduler
        self._fetching: Fetching

    @property
    def name(self) -> str:
        return self.state.device

    @property
    def denied(self) -> str:
        """Why the broker denies access, or ""."""
        return self.connection.denied

    @property
    def is_quiet(self) -> bool:
        """Whether the device is connected and has neither work nor reports left."""
        at = self.state
        return at.phase is Phase.UP and at.work is None and at.pending is None and not at.outbox

    @property
    def fetching(self) -> Count | None:
        """Progress of the download under way."""
        if (download := self._fetching.download) is None or (work := self.state.work) is None:
            return None
        assignment = work.assignment
        serves = assignment.mode == "serve"
        stage = f"release {assignment.release}" if serves else f"round {assignment.round}"
        return Count(stage, download.verified_bytes, download.blob.bytes, bytes=True)

    @property
    def wake_s(self) -> float:
        """When the device next needs a tick."""
        return math.inf if self.crashed else min(state.wake_at(self.state), self._fetching.wake_s)

    def connect(self, connect: Connect, scheduler: Scheduler) -> None:
        """Connect to the broker; events arrive through `handle`."""
        self._scheduler = scheduler
        self._fetching = Fetching(
            self.name,
            self.state.topics,
            self._fetch_limits,
            partial(scheduler.request_fetch, self),
            scheduler.end_fetch,
            self.connection.carry_out,
            lambda outcome: self._step(self._broadcasts.joined(outcome)),
            self._on_metadata,
        )
        self.connection.open(connect, will(self.state.boot), partial(scheduler.deliver, self))

    def crash(self) -> None:
        """Cut the connection as a power failure would, and ignore later events."""
        self.crashed = True
        self.connection.cut()
        self._fetching.abandon()

    def handle(self, event: DeviceEvent) -> None:
        """Process one event and carry out its effects."""
        if not self.crashed:
            _EVENTS.get(type(event), Device._step)(self, event)
        elif isinstance(event, MayFetch):
            self._scheduler.end_fetch()

    def _step(self, event: events.Event) -> None:
        self.state, requested = step(self.state, event, self._now_s)
        for effect in requested:
            if (carry_out := _EFFECTS.get(type(effect))) is None:
                self.connection.carry_out([effect])
                continue
            try:
                carry_out(self, effect)
            except (EdgeFLError, OSError) as error:
                log.warning("%s: %s failed: %s", self.name, type(effect).__name__, error)

    @property
    def _now_s(self) -> float:
        return self._scheduler.now_s()

    # events

    def _on_connected(self, event: Connected) -> None:
        self._step(event)
        self._fetching.resume(self._now_s)

    def _on_disconnected(self, event: Disconnected) -> None:
        self.connection.observe(event)
        interrupted = self._fetching.pause()
        self._step(event)
        if interrupted:
            self._step(events.Interrupted())

    def _on_tick(self, event: events.Tick) -> None:
        self._fetching.tick(self._now_s)
        self._step(event)

    def _on_answer(self, answered: SumAnswered | QueryAnswered) -> None:
        try:
            self.connection.publish(answered.packets(self.state.topics, self.name))
        except EdgeFLError as error:
            log.warning("%s: %s was not sent: %s", self.name, type(answered).__name__, error)

    def _on_keys(self, event: KeysRefreshed) -> None:
        for received in self._verifier.retried():
            self._take(received)

    def _on_packet(self, packet: Packet) -> None:
        self.connection.observe(packet)
        try:
            address = self.state.topics.parse(packet.topic)
            if receive := _TOPICS.get(address.kind):
                receive(self, address, packet)
            elif address.kind in MESSAGES:
                self._receive_message(address, packet)
        except ProtocolError as error:
            log.warning("%s: %s", self.name, error)

    def _on_metadata(self, release: int, outcome: dict[str, bytes] | events.Failed) -> None:
        """Use fetched metadata: for the messages that wait for a key, and for a release."""
        if self._verifier.waiting:
            self._scheduler.submit(self, partial(self._verifier.refresh, outcome))
        if release and isinstance(outcome, events.Failed):
            self._step(outcome)
        elif release:
            self._submit(effects.Refresh(release), outcome)

    # packets, by the kind of their topic

    def _receive_fetched(self, address: Address, packet: Packet) -> None:
        """Take what may be of a fetch; an echo and new metadata are more than that."""
        self._fetching.received(address, packet.payload, self._now_s)
        if address.kind == "echo":
            self._receive_message(address, packet)
        elif address.path == ("timestamp.json",) and (hash := digest(packet.payload)) != self._timestamp:
            self._timestamp = hash
            self._step(events.MetadataChanged())

    def _receive_sum(self, address: Address, packet: Packet) -> None:
        if packet.payload and not packet.retain:
            self._receive_message(address, packet)

    def _receive_query(self, address: Address, packet: Packet) -> None:
        if packet.payload and not packet.retain:
            deliver = partial(self._scheduler.deliver, self)
            self._services.answer_query(packet.payload, self.state, deliver)

    def _receive_message(self, address: Address, packet: Packet) -> None:
        if event := self._verifier.received(address, packet):
            self._take(event)
        elif self._fetching.metadata is None:
            self._fetching.look_up(0, self._now_s)

    # messages whose signature was checked, by the kind of their topic

    def _take(self, event: events.Received) -> None:
        _MESSAGES.get(event.address.kind, Device._step)(self, event)

    def _take_sum(self, event: events.Received) -> None:
        if isinstance(event.message, SumStep):
            answer = partial(self._sums.answer, event.message, event.number, event.rejected)
            self._scheduler.submit(self, answer)

    def _take_ack(self, event: events.Received) -> None:
        if isinstance(event.message, Ack):
            self.reporting.acknowledged[event.message.status] += 1
        self._step(event)

    # effects that are not of the wire

    def _send(self, effect: effects.Send) -> None:
        self.connection.publish(self.reporting.packets(effect))

    def _fetch(self, effect: effects.Fetch) -> None:
        if effect.keep:
            self._fetching.fetch(effect.blob, self.worker.sink(effect.blob))
        elif effect.blob in self._broadcasts:
            self._scheduler.deliver(self, events.Fetched(effect.blob.sha256, 0))
        else:
            self._fetching.fetch(effect.blob, self._broadcasts.sink(effect.blob))

    def _submit(self, job: effects.Job, material: Any = None) -> None:
        self._scheduler.submit(self, partial(attempt, partial(self.worker.perform, job, material)))


_EVENTS: dict[type, Callable[[Device, Any], None]] = {
    Packet: Device._on_packet,
    Connected: Device._on_connected,
    Disconnected: Device._on_disconnected,
    events.Tick: Device._on_tick,
    MayFetch: lambda device, event: device._fetching.begin(device._now_s),
    SumAnswered: Device._on_answer,
    QueryAnswered: Device._on_answer,
    KeysRefreshed: Device._on_keys,
}
"""Events that are more than one of the agent."""
_TOPICS: dict[str, Callable[[Device, Address, Packet], None]] = {
    "art": Device._receive_fetched,
    "tuf": Device._receive_fetched,
    "echo": Device._receive_fetched,
    "sum": Device._receive_sum,
    "query": Device._receive_query,
}
"""Packets that are more, or less, than a message."""
_MESSAGES: dict[str, Callable[[Device, events.Received], None]] = {
    "sum": Device._take_sum,
    "ack": Device._take_ack,
    "settings": lambda device, event: device._step(
        events.SettingsChanged(device._services.take_settings(event))
    ),
}
"""Messages that are more than an event of the agent."""
_EFFECTS: dict[type[effects.Effect], Callable[[Device, Any], None]] = {
    effects.Send: Device._send,
    effects.Fetch: Device._fetch,
    effects.CancelFetch: lambda device, effect: device._fetching.cancel(),
    effects.Refresh: lambda device, effect: device._fetching.look_up(effect.release, device._now_s),
    effects.Train: lambda device, job: device._submit(job, device._broadcasts.take(job.assignment)),
    effects.Install: Device._submit,
    effects.Fit: Device._submit,
    effects.Remember: lambda device, effect: device.worker.store.remember(effect.memory),
    effects.Keep: lambda device, effect: device.worker.store.keep(effect.parcel),
    effects.Forget: lambda device, effect: device.worker.store.forget(effect.id),
    effects.Revoke: lambda device, effect: device.worker.store.revoke(),
    effects.Unblock: lambda device, effect: device.worker.unblock(),
    effects.DesireUpdate: lambda device, effect: device._services.desire_update(effect.update),
    effects.Stop: lambda device, effect: None,  # the runner disconnects
}
"""Effects that are not of the wire."""
