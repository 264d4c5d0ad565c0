"""One agent with its connection, worker and fetches: packets become events, effects become calls.

A device has no thread of its own. Its runner delivers events, keeps the time and runs its jobs; results come back through the
runner's queue.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_fl.blob import Assembly, digest
from edge_fl.console.progress import Count
from edge_fl.errors import ArtefactError, ConnectError, EdgeFLError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.secure import floors
from edge_fl.secure.floors import SumFloors
from edge_fl.wire.messages import (
    MESSAGES,
    Ack,
    Assignment,
    Capability,
    Echo,
    Report,
    SumRequest,
    SumStep,
    encode,
)
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import Connected, Disconnected, Packet, Transport
from edge_fl_devices.agent import effects, events, outbox, state
from edge_fl_devices.agent.state import AgentLimits, AgentState, Phase
from edge_fl_devices.agent.step import step, will
from edge_fl_devices.install import fetch
from edge_fl_devices.install.fetch import Download, FetchLimits, MetadataFetch
from edge_fl_devices.remote.answering import AnswerQuery, QueryAnswered, decline
from edge_fl_devices.remote.log_file import note
from edge_fl_devices.runtime import interfaces
from edge_fl_devices.runtime.interfaces import DeviceConnect, DeviceEvent, MayFetch, Scheduler
from edge_fl_devices.runtime.report_packets import report_packets
from edge_fl_devices.runtime.signatures import KeysRefreshed, StatementSigner, Verifier
from edge_fl_devices.workers.secure_sums import SumAnswered, SumParticipant
from edge_fl_devices.workers.worker import Material, Worker, attempt

log = logging.getLogger(__name__)

RECENT, RECENT_BYTES = 2, 64 * 1024 * 1024
"""How many broadcasts stay in memory between assignments, and their size: a device of the panel has one of its two
models already, and the other is usually the next broadcast."""


@dataclass(eq=False, slots=True)
class Device:
    """One device of a runner.

    identity: the folder with its certificate. sum_floors: the least protection with which it takes part in secure sums. reports: the last
    report sent, by kind. totals: sums over all reports, and `wire_bytes`. acknowledged: acknowledgements by status. denied: why the broker
    denies access, or "". planned_s: the runner's next tick.
    """

    state: AgentState
    worker: Worker
    fetch_limits: FetchLimits = fetch.LIMITS
    identity: Path | None = None
    answer_query: AnswerQuery = decline
    desire_update: interfaces.DesireUpdate = interfaces.no_updates
    take_settings: interfaces.TakeSettings = interfaces.fixed_settings
    sum_floors: SumFloors = floors.DEFAULT
    reports: dict[str, Report] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)
    acknowledged: Counter[str] = field(default_factory=Counter)
    denied: str = ""
    planned_s: float = math.inf
    crashed: bool = False
    _scheduler: Scheduler = field(init=False)
    _transport: Transport | None = None
    _download: Download | None = None
    _metadata_fetch: MetadataFetch | None = None
    _broadcast: Assembly | None = None
    _broadcasts: dict[str, bytes] = field(default_factory=dict)  # the newest, by hash, oldest first
    _timestamp: str = ""
    _sums: SumParticipant = field(init=False)
    _verifier: Verifier = field(init=False)
    _signer: StatementSigner = field(init=False)

    def __post_init__(self) -> None:
        fleet = self.state.topics.fleet
        self._verifier = Verifier(fleet, self.name, self.worker.verifies)
        self._signer = StatementSigner(fleet, self.name, self.identity, self.state.memory.starts)
        self._sums = SumParticipant(
            self.name, fleet, self.identity, self, self.worker.store.folder, self.sum_floors
        )

    @property
    def name(self) -> str:
        return self.state.device

    @property
    def is_quiet(self) -> bool:
        """Whether the device is connected and has neither work nor reports left."""
        at = self.state
        return at.phase is Phase.UP and at.work is None and at.pending is None and not at.outbox

    @property
    def fetching(self) -> Count | None:
        """Progress of the download under way."""
        if (download := self._download) is None or (work := self.state.work) is None:
            return None
        assignment = work.assignment
        serves = assignment.mode == "serve"
        stage = f"release {assignment.release}" if serves else f"round {assignment.round}"
        return Count(stage, download.verified_bytes, download.blob.bytes, bytes=True)

    @property
    def wake_s(self) -> float:
        """When the device next needs a tick."""
        times = [state.wake_at(self.state), *(transfer.wake_s for transfer in self._fetches())]
        return math.inf if self.crashed else min(times)

    def connect(self, connect: DeviceConnect, scheduler: Scheduler) -> None:
        """Connect to the broker; events arrive through `handle`."""
        self._scheduler = scheduler
        topic, message = self.state.topics.state(self.name), encode(will(self.state.boot))
        self._transport = connect(
            self.name, Packet(topic, message, retain=True), partial(scheduler.deliver, self)
        )

    def wait_connected(self, deadline_s: float) -> None:
        """Wait for the broker. Raises ConnectError; connecting continues in the background."""
        self._connection.wait_connected(deadline_s)

    def disconnect(self, deadline_s: float) -> None:
        """Wait until all publications have left, then disconnect cleanly."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        try:
            transport.drain(deadline_s)
        except EdgeFLError as error:
            log.warning("%s: unsent messages are lost: %s", self.name, error.message)
        transport.close()

    def crash(self) -> None:
        """Cut the connection as a power failure would: the broker publishes the will, and later events are ignored."""
        self.crashed = True
        transport, self._transport = self._transport, None
        if transport:
            transport.close(clean=False)
        if self._download and self._download.begun:
            self._scheduler.end_fetch()

    def handle(self, event: DeviceEvent) -> None:
        """Process one event and carry out its effects."""
        if self.crashed:
            if isinstance(event, MayFetch):
                self._scheduler.end_fetch()
            return
        match event:
            case Packet():
                self.totals["wire_bytes"] += len(event.topic) + len(event.payload)
                self._receive(event)
                return
            case MayFetch():
                self._begin_download()
                return
            case SumAnswered() | QueryAnswered():
                self._send_answer(event)
                return
            case KeysRefreshed():
                for received in self._verifier.retried():
                    self._take(received)
                return
            case Connected():
                self._step(event)
                for transfer in self._fetches():
                    self.carry_out(transfer.begin(self._now_s) if transfer.begun else ())
                return
            case Disconnected(reason, final):
                log.info("%s: connection lost: %s", self.name, reason)
                self.denied = reason if final else ""
                for transfer in self._fetches():
                    transfer.wake_s = math.inf  # time without a connection does not count
            case events.Tick():
                if self._download:
                    self._advance_download(self._download.tick(self._now_s))
                if self._metadata_fetch:
                    self._advance_metadata(self._metadata_fetch)
        self._step(event)

    def _step(self, event: events.Event) -> None:
        if isinstance(event, events.Received) and event.address.kind == "settings":
            event = events.SettingsChanged(self.take_settings(event))
        self.state, requested = step(self.state, event, self._now_s)
        self.carry_out(requested)

    def _receive(self, packet: Packet) -> None:
        try:
            address = self.state.topics.parse(packet.topic)
            if address.kind == "art":
                self._receive_chunk(address, packet.payload)
            elif address.kind == "tuf":
                self._receive_metadata(address.path[0], packet.payload)
            elif address.kind == "sum":
                if packet.payload and not packet.retain:
                    self._receive_message(address, packet)
            elif address.kind == "query":
                if packet.payload and not packet.retain:
                    self.answer_query(packet.payload, self.state, partial(self._scheduler.deliver, self))
            elif address.kind in MESSAGES:
                self._receive_message(address, packet)
        except ProtocolError as error:
            log.warning("%s: %s", self.name, error)

    def _receive_message(self, address: Address, packet: Packet) -> None:
        if (event := self._verifier.received(address, packet)) is None:
            if self._metadata_fetch is None:
                self._fetch_metadata()
            return
        self._take(event)

    def _take(self, event: events.Received) -> None:
        """Take a message whose signature was checked."""
        if isinstance(event.message, SumStep):
            answer = partial(self._sums.answer, event.message, event.number, event.rejected)
            self._scheduler.submit(self, answer)
            return
        if isinstance(event.message, Ack):
            self.acknowledged[event.message.status] += 1
        elif isinstance(event.message, Echo) and self._metadata_fetch:
            self._metadata_fetch.echo(event.message, self._now_s)
            self._advance_metadata(self._metadata_fetch)
        self._step(event)

    def _fetches(self) -> list[Download | MetadataFetch]:
        return [transfer for transfer in (self._download, self._metadata_fetch) if transfer]

    def _request_download(self, effect: effects.Fetch) -> None:
        if not effect.keep and effect.blob.sha256 in self._broadcasts:
            self._scheduler.deliver(self, events.Fetched(effect.blob.sha256, 0))
            return
        sink = self.worker.sink(effect.blob, keep=effect.keep)
        if isinstance(sink, Assembly):
            partial_broadcast = self._broadcast  # a failed fetch continues where it stopped
            if partial_broadcast and partial_broadcast.blob == effect.blob:
                sink = partial_broadcast
            self._broadcast = sink
        self._download = Download(effect.blob, sink, self.name, self.state.topics, self.fetch_limits)
        self._scheduler.request_fetch(self)

    def _with_broadcast(self, outcome: events.Fetched | events.Failed) -> events.Fetched | events.Failed:
        """The outcome of a download; a complete broadcast is put together."""
        if (broadcast := self._broadcast) and broadcast.complete:
            self._broadcast = None
            try:
                self._broadcasts[broadcast.blob.sha256] = broadcast.join()
            except (
                ArtefactError
            ) as error:  # its chunks are those of the descriptor, but they are not the blob
                log.warning("%s: %s", self.name, error)
                return events.Failed(Failure.BLOB_HASH)
        return outcome

    def _take_broadcasts(self, assignment: Assignment) -> Material:
        """The fetched broadcasts of an assignment. The newest stay in memory for the next one if they are small."""
        found = self._broadcasts
        wanted = [blob.sha256 for blob in (assignment.before, assignment.down) if blob]
        taken = {sha256: found[sha256] for sha256 in wanted}
        kept = {**{sha256: payload for sha256, payload in found.items() if sha256 not in taken}, **taken}
        while len(kept) > RECENT or sum(map(len, kept.values())) > RECENT_BYTES:
            del kept[next(iter(kept))]
        self._broadcasts = kept
        if assignment.mode == "compare":
            return taken
        return taken[assignment.down.sha256] if assignment.down else None

    def _begin_download(self) -> None:
        if self._download and not self._download.begun:
            self._advance_download(self._download.begin(self._now_s))
        else:
            self._scheduler.end_fetch()

    def _receive_chunk(self, address: Address, payload: bytes) -> None:
        sha256, _, index = address.path
        if (download := self._download) and download.blob.sha256 == sha256 and payload:
            self._advance_download(download.chunk(int(index), payload, self._now_s))

    def _advance_download(self, requested: Iterable[effects.Effect]) -> None:
        self.carry_out(requested)
        if (download := self._download) and download.outcome:
            self._end_download(download)
            self._step(self._with_broadcast(download.outcome))

    def _cancel_download(self) -> None:
        if download := self._download:
            self.carry_out(download.cancel() if download.begun else ())
            self._end_download(download)

    def _end_download(self, download: Download) -> None:
        self._download = None
        if download.begun:
            self._scheduler.end_fetch()

    def _fetch_metadata(self, release: int = 0) -> None:
        self._metadata_fetch = MetadataFetch(release, self.name, self.state.topics, self.fetch_limits)
        self.carry_out(self._metadata_fetch.begin(self._now_s))

    def _receive_metadata(self, file: str, payload: bytes) -> None:
        if self._metadata_fetch:
            self._metadata_fetch.file(file, payload, self._now_s)
        if file == "timestamp.json" and (hash := digest(payload)) != self._timestamp:
            self._timestamp = hash
            self._step(events.MetadataChanged())

    def _advance_metadata(self, metadata_fetch: MetadataFetch) -> None:
        self.carry_out(metadata_fetch.tick(self._now_s))
        if metadata_fetch.outcome is None:
            return
        self._metadata_fetch = None
        if self._verifier.waiting:
            self._scheduler.submit(self, partial(self._verifier.refresh, metadata_fetch.outcome))
        if metadata_fetch.release and isinstance(metadata_fetch.outcome, events.Failed):
            self._step(metadata_fetch.outcome)
        elif metadata_fetch.release:
            self._submit(effects.Refresh(metadata_fetch.release), metadata_fetch.outcome)

    def carry_out(self, requested: Iterable[effects.Effect]) -> None:
        """Carry out effects; those of publishing and subscribing in any thread."""
        for effect in requested:
            try:
                self._carry_out_one(effect)
            except (EdgeFLError, OSError) as error:
                log.warning("%s: %s failed: %s", self.name, type(effect).__name__, error)

    def _carry_out_one(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Subscribe(pattern, qos):
                self._connection.subscribe(pattern, qos=qos)
            case effects.Unsubscribe(pattern):
                self._connection.unsubscribe(pattern)
            case effects.SpreadReconnects(over_s):
                self._connection.spread(over_s)
            case effects.Publish(topic, message, retain, expiry_s):
                note(self.name, message)
                self._publish(Packet(topic, encode(self._signer.signed(message)), retain, expiry_s=expiry_s))
            case effects.Send():
                self._send(effect)
            case effects.Fetch():
                self._request_download(effect)
            case effects.CancelFetch():
                self._cancel_download()
            case effects.Refresh(release):
                self._fetch_metadata(release)
            case effects.Train():
                self._submit(effect, self._take_broadcasts(effect.assignment))
            case effects.Install() | effects.Fit():
                self._submit(effect, None)
            case effects.Remember(memory):
                self.worker.store.remember(memory)
            case effects.Keep(parcel):
                self.worker.store.keep(parcel)
            case effects.Forget(id):
                self.worker.store.forget(id)
            case effects.Revoke():
                self.worker.store.revoke()
            case effects.DesireUpdate(update):
                self.desire_update(update)

    def _send(self, effect: effects.Send) -> None:
        """Send a report, its blob's chunks first."""
        report = effect.parcel.report
        self._count(report)
        payload = self.worker.store.blob(report.id) or b"" if report.blob else b""
        for packet in report_packets(
            self.state.topics, self.name, effect, self._signer.signed(report), payload
        ):
            self._publish(packet)

    def offer(self, id: str, request: SumRequest) -> NDArray[np.float64] | None:
        """Return the worker's vector for a secure sum; None while a daily budget is used up. In a worker thread, like the next two."""
        return None if self.state.over_budget else self.worker.offer(id, request)

    def commit(self, id: str, request: SumRequest, *, leaves: bool) -> None:
        self.worker.commit(id, request, leaves=leaves)

    def settle(self, id: str, devices: Collection[str]) -> None:
        self.worker.settle(id, devices)

    def _send_answer(self, answered: SumAnswered | QueryAnswered) -> None:
        try:
            for packet in answered.packets(self.state.topics, self.name):
                self._publish(packet)
        except EdgeFLError as error:
            log.warning("%s: %s was not sent: %s", self.name, type(answered).__name__, error)

    def _publish(self, packet: Packet) -> None:
        self.totals["wire_bytes"] += len(packet.topic) + len(packet.payload)
        self._connection.publish(packet)

    def _count(self, report: Report) -> None:
        """Add a report to the totals, once."""
        if (last := self.reports.get(report.kind)) and last.id == report.id:
            return
        self.reports[report.kind] = report
        self.totals.update(
            reports=1,
            bytes_down=report.bytes_down,
            bytes_up=report.bytes_up,
            milliseconds=round(1000 * report.seconds),
        )

    def _submit(self, job: effects.Job, material: Any) -> None:
        self._scheduler.submit(self, partial(attempt, partial(self.worker.perform, job, material)))

    @property
    def _now_s(self) -> float:
        return self._scheduler.now_s()

    @property
    def _connection(self) -> Transport:
        if self._transport:
            return self._transport
        raise ConnectError("not connected")


def start(
    name: str,
    topics: Topics,
    capability: Capability,
    worker: Worker,
    *,
    limits: AgentLimits = state.LIMITS,
    fetching: FetchLimits = fetch.LIMITS,
    data_problem: str = "",
    identity: Path | None = None,
    sum_floors: SumFloors = floors.DEFAULT,
) -> Device:
    """Create a device with a new boot id and the memory, reports and release of its store.

    data_problem: the failure word if its data could not be read. identity: the folder with its certificate. sum_floors: the least
    protection with which it takes part in secure sums.
    """
    release, store = worker.boot(), worker.store
    initial = AgentState(
        device=name,
        boot=secrets.token_hex(8),
        topics=topics,
        capability=capability,
        limits=limits,
        memory=store.begin() if identity else store.memory(),
        outbox=outbox.restored(store.outbox(), time.monotonic()),
        release=release,
        data_problem=data_problem,
    )
    return Device(initial, worker, fetching, identity, sum_floors=sum_floors)
