"""One agent with all that it acts through: its connection, its worker, its fetches. Packets become events, effects become calls.

A device has no thread. Its runner calls it, tells it the time, and runs its jobs; whatever a job or the broker brings comes back
through the runner's queue.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from msgspec import Struct

from devices.agent import effects, events, outbox, state
from devices.agent.outbox import Outbox
from devices.agent.state import AgentState, AgentLimits, Phase
from devices.agent.step import step, will
from devices.install import fetch
from devices.install.fetch import Download, FetchLimits, MetadataFetch
from devices.runtime.interfaces import DeviceConnect, DeviceEvent, MayFetch, Scheduler
from devices.workers.worker import Worker, attempt
from edge_fl.console.progress import Count
from edge_fl.errors import ConnectError, EdgeFLError, ProtocolError
from edge_fl.wire.blob import Assembly, digest, split
from edge_fl.wire.messages import MESSAGES, Ack, Capability, Echo, Report, decode, encode
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import SAFETENSORS, Connected, Disconnected, Packet, Transport

log = logging.getLogger(__name__)

HEARD = frozenset({"server_state", "round", "assignment", "cmd", "ack", "echo"})


class Device:
    """`reports` are the latest sent, by kind, `totals` their numbers summed up over all of them, `acknowledged` the answers by status.

    `lost` is why the broker does not let the device in.
    """

    __slots__ = (
        "_broadcast",
        "_download",
        "_limits",
        "_metadata_fetch",
        "_scheduler",
        "_timestamp",
        "_transport",
        "acknowledged",
        "crashed",
        "denied",
        "planned_s",
        "reports",
        "state",
        "totals",
        "worker",
    )

    def __init__(self, state: AgentState, worker: Worker, limits: FetchLimits = fetch.LIMITS) -> None:
        self.state, self.worker = state, worker
        self.reports: dict[str, Report] = {}
        self.totals: Counter[str] = Counter()
        self.acknowledged: Counter[str] = Counter()
        self.denied = ""
        self.planned_s = math.inf  # for the runner: when it will tick
        self.crashed = False
        self._limits = limits
        self._scheduler: Scheduler | None = None
        self._transport: Transport | None = None
        self._download: Download | None = None
        self._metadata_fetch: MetadataFetch | None = None
        self._broadcast: Assembly | None = None
        self._timestamp = ""

    @property
    def name(self) -> str:
        return self.state.device

    @property
    def is_quiet(self) -> bool:
        """Whether it is connected, has nothing to do and nothing to deliver."""
        at = self.state
        return at.phase is Phase.UP and at.work is None and at.pending is None and not at.outbox

    @property
    def fetching(self) -> Count | None:
        """How much is here of what is on its way; None while nothing is."""
        if (download := self._download) is None or (work := self.state.work) is None:
            return None
        stage = (
            f"release {work.assignment.release}"
            if work.assignment.mode == "serve"
            else f"round {work.assignment.round}"
        )
        return Count(stage, download.here_bytes, download.blob.bytes, bytes=True)

    @property
    def wake_s(self) -> float:
        """When it next needs a tick."""
        if self.crashed:
            return math.inf
        fetching = (found.wake_s for found in (self._download, self._metadata_fetch) if found)
        return min(state.wake_at(self.state), *fetching, math.inf)

    def connect(self, connect: DeviceConnect, scheduler: Scheduler) -> None:
        """Makes the connection; everything else comes through `take`."""
        self._scheduler = scheduler
        last_will = Packet(
            self.state.topics.state(self.name), encode(will(self.name, self.state.boot)), retain=True
        )
        self._transport = connect(self.name, last_will, partial(scheduler.deliver, self))

    def wait_connected(self, deadline_s: float) -> None:
        """Waits for the broker. Raises ConnectError; the connection is tried on."""
        self._through.wait_connected(deadline_s)

    def take(self, event: DeviceEvent) -> None:
        """One event, carried through to its last effect."""
        if self.crashed:
            if isinstance(event, MayFetch) and self._scheduler:
                self._scheduler.end_fetch()
            return
        match event:
            case Packet():
                self.totals["wire_bytes"] += len(event.topic) + len(event.payload)
                self._hear(event)
            case Connected():
                self._step(event)
                for found in (self._download, self._metadata_fetch):
                    self._do(found.begin(self._now_s) if found and found.begun else ())
            case MayFetch():
                self._may_fetch()
            case Disconnected(reason, final):
                self.denied = reason if final else ""
                for found in (self._download, self._metadata_fetch):
                    if found:
                        found.wake_s = math.inf  # time without a connection does not count
                self._step(event)
            case events.Tick():
                self._tick(event)
            case _:
                self._step(event)

    def disconnect(self, deadline_s: float) -> None:
        """Waits until what was said has left, then disconnects in order."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        try:
            transport.drain(deadline_s)
        except EdgeFLError as error:
            log.warning("%s: goodbye: %s", self.name, error)
        transport.close()

    def crash(self) -> None:
        """Ends without a word: the broker publishes its will, and nothing that still comes changes or writes anything."""
        self.crashed = True
        transport, self._transport = self._transport, None
        if transport:
            transport.close(clean=False)
        if self._scheduler and self._download and self._download.begun:
            self._scheduler.end_fetch()

    # events

    def _step(self, event: events.Event) -> None:
        self.state, wanted = step(self.state, event, self._now_s)
        self._do(wanted)

    def _tick(self, event: events.Tick) -> None:
        if self._download:
            self._fetching(self._download.tick(self._now_s))
        if self._metadata_fetch:
            self._metadata_fetched(self._metadata_fetch)
        self._step(event)

    def _hear(self, packet: Packet) -> None:
        try:
            address = self.state.topics.parse(packet.topic)
            if address.kind == "art":
                self._chunk(address, packet.payload)
            elif address.kind == "tuf":
                self._metadata(address.path[0], packet.payload)
            elif address.kind in HEARD:
                message = _decoded(address.kind, packet.payload) if packet.payload else None
                if isinstance(message, Ack):
                    self.acknowledged[message.status] += 1
                elif isinstance(message, Echo) and self._metadata_fetch:
                    self._metadata_fetch.echo(message, self._now_s)
                    self._metadata_fetched(self._metadata_fetch)
                self._step(events.Received(address, message, packet.retain))
        except ProtocolError as error:
            log.warning("%s: %s", self.name, error)

    def _chunk(self, address: Address, payload: bytes) -> None:
        sha256, _, index = address.path
        if (download := self._download) and download.blob.sha256 == sha256 and payload:
            self._fetching(download.chunk(int(index), payload, self._now_s))

    def _may_fetch(self) -> None:
        if self._download and not self._download.begun:
            self._fetching(self._download.begin(self._now_s))
        elif self._scheduler:
            self._scheduler.end_fetch()

    def _fetching(self, wanted: Iterable[effects.Effect]) -> None:
        self._do(wanted)
        if (download := self._download) and download.outcome:
            self._end_download(download)
            self._step(download.outcome)

    def _end_download(self, download: Download) -> None:
        self._download = None
        if download.begun and self._scheduler:
            self._scheduler.end_fetch()

    def _metadata(self, file: str, payload: bytes) -> None:
        if self._metadata_fetch:
            self._metadata_fetch.file(file, payload, self._now_s)
        if file == "timestamp.json" and (found := digest(payload)) != self._timestamp:
            self._timestamp = found
            self._step(events.MetadataChanged())

    def _metadata_fetched(self, metadata_fetch: MetadataFetch) -> None:
        self._do(metadata_fetch.tick(self._now_s))
        if metadata_fetch.outcome is None:
            return
        self._metadata_fetch = None
        if isinstance(metadata_fetch.outcome, events.Failed):
            self._step(metadata_fetch.outcome)
        else:
            self._work(effects.Refresh(metadata_fetch.release), metadata_fetch.outcome)

    # effects

    def _do(self, wanted: Iterable[effects.Effect]) -> None:
        for effect in wanted:
            try:
                _DO[type(effect)](self, effect)
            except (EdgeFLError, OSError) as error:
                log.warning("%s: %s failed: %s", self.name, type(effect).__name__, error)

    def _subscribe(self, effect: effects.Subscribe) -> None:
        self._through.subscribe(effect.pattern, qos=effect.qos)

    def _unsubscribe(self, effect: effects.Unsubscribe) -> None:
        self._through.unsubscribe(effect.pattern)

    def _spread(self, effect: effects.SpreadReconnects) -> None:
        self._through.spread(effect.over_s)

    def _publish(self, effect: effects.Publish) -> None:
        self._say(Packet(effect.topic, encode(effect.message), effect.retain, expiry_s=effect.expiry_s))

    def _send(self, effect: effects.Send) -> None:
        topics, parcel, report = self.state.topics, effect.parcel, effect.parcel.report
        if report.blob:
            for index, chunk in enumerate(
                split(self.worker.store.blob(report.id) or b"", report.blob.chunk_bytes)
            ):
                topic = topics.blob(self.name, report.id, index)
                self._say(Packet(topic, bytes(chunk), content_type=SAFETENSORS, expiry_s=effect.expiry_s))
        self._count(report)
        topic = topics.report(self.name, parcel.run_id, parcel.round)
        self._say(Packet(topic, encode(report), expiry_s=effect.expiry_s))

    def _say(self, packet: Packet) -> None:
        self.totals["wire_bytes"] += len(packet.topic) + len(packet.payload)
        self._through.publish(packet)

    def _count(self, report: Report) -> None:
        if (before := self.reports.get(report.kind)) and before.id == report.id:
            return
        self.reports[report.kind] = report
        self.totals.update(
            reports=1,
            bytes_down=report.bytes_down,
            bytes_up=report.bytes_up,
            milliseconds=round(1000 * report.seconds),
        )

    def _refresh(self, effect: effects.Refresh) -> None:
        self._metadata_fetch = MetadataFetch(effect.release, self.name, self.state.topics, self._limits)
        self._do(self._metadata_fetch.begin(self._now_s))

    def _fetch(self, effect: effects.Fetch) -> None:
        sink = self.worker.sink(effect.blob, keep=effect.keep)
        if isinstance(sink, Assembly):
            begun = self._broadcast  # a fetch that failed goes on where it was
            self._broadcast = sink = begun if begun and begun.blob == effect.blob else sink
        self._download = Download(effect.blob, sink, self.name, self.state.topics, self._limits)
        if self._scheduler:
            self._scheduler.request_fetch(self)

    def _abandon(self, effect: effects.CancelFetch) -> None:
        if download := self._download:
            self._do(download.end() if download.begun else ())
            self._end_download(download)

    def _train(self, effect: effects.Train) -> None:
        broadcast, self._broadcast = self._broadcast, None
        self._work(effect, broadcast.join() if broadcast and effect.assignment.down else None)

    def _job(self, effect: effects.Install | effects.Fit) -> None:
        self._work(effect, None)

    def _work(self, job: effects.Job, material: Any) -> None:
        if self._scheduler:
            self._scheduler.submit(self, partial(attempt, partial(self.worker.perform, job, material)))

    def _remember(self, effect: effects.Remember) -> None:
        self.worker.store.remember(effect.memory)

    def _keep(self, effect: effects.Keep) -> None:
        self.worker.store.keep(effect.parcel)

    def _forget(self, effect: effects.Forget) -> None:
        self.worker.store.forget(effect.id)

    def _revoke(self, effect: effects.Revoke) -> None:
        self.worker.revoke()

    def _stop(self, effect: effects.Stop) -> None:
        """The runner disconnects, once all its devices have said goodbye."""

    @property
    def _now_s(self) -> float:
        return self._scheduler.now_s() if self._scheduler else 0.0

    @property
    def _through(self) -> Transport:
        if self._transport is None:
            raise ConnectError("not connected")
        return self._transport


def start(
    name: str,
    topics: Topics,
    capability: Capability,
    worker: Worker,
    *,
    limits: AgentLimits = state.LIMITS,
    fetching: FetchLimits = fetch.LIMITS,
) -> Device:
    """A device at the start of a process: a new boot with all that its store kept."""
    release, now_s = worker.boot(), time.monotonic()
    waiting: Outbox = ()
    for parcel in worker.store.outbox():
        waiting = outbox.put(waiting, parcel, now_s)
    boot, memory = secrets.token_hex(8), worker.store.memory()
    at = AgentState(name, boot, topics, capability, limits, memory, waiting, release)
    return Device(at, worker, fetching)


@functools.lru_cache(64)
def _decoded(kind: str, payload: bytes) -> Struct:
    """One message object for all devices of the process that hear the same bytes."""
    return decode(payload, MESSAGES[kind])


_DO: dict[type, Callable[[Device, Any], None]] = {
    effects.Subscribe: Device._subscribe,
    effects.Unsubscribe: Device._unsubscribe,
    effects.SpreadReconnects: Device._spread,
    effects.Publish: Device._publish,
    effects.Send: Device._send,
    effects.Refresh: Device._refresh,
    effects.Fetch: Device._fetch,
    effects.CancelFetch: Device._abandon,
    effects.Train: Device._train,
    effects.Install: Device._job,
    effects.Fit: Device._job,
    effects.Remember: Device._remember,
    effects.Keep: Device._keep,
    effects.Forget: Device._forget,
    effects.Revoke: Device._revoke,
    effects.Stop: Device._stop,
}
