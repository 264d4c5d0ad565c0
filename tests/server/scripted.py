"""Scripted devices: full and head-only clients that follow the protocol, with the deviations that a test gives them."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_fl import metrics
from edge_fl.blob import Assembly, describe, split
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig, OptimiserConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.inputs import InputSpec
from edge_fl.learn.tree import from_arrays, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.seeds import generator
from edge_fl.wire import tensors
from edge_fl.wire.messages import Ack, Assignment, Capability, DeviceState, Report, Round, decode, encode
from edge_fl.wire.topics import GROUP, Topics
from edge_fl.wire.transport import SAFETENSORS, Connected, Packet, Transport
from edge_fl_devices.install.trust import Trust
from edge_fl_server.mqtt.connector import ServerConnect
from edge_fl_server.mqtt.updates.inbox import REPORT_KINDS

CLASSES = 3
INPUT = InputSpec((1, 4, 4), (0.5,), (0.25,))


def spec_of(method: str, **options: Any) -> MethodSpec:
    """A method spec small enough for a test: 4x4 images, three classes."""
    model = ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2})
    config = MethodConfig(method, 1, 8, OptimiserConfig("sgd", 0.05), options)
    return MethodSpec(model, INPUT, ["a", "b", "c"], config, seed=1)


def data_of(client: str, samples: int = 20) -> ClientData:
    """Images of a client: each class has its brightness."""
    rng = generator(7, "test.data", client=client)

    def some(count: int) -> Samples:
        y = rng.integers(0, CLASSES, count)
        return Samples(
            (80 * y[:, None, None, None] + rng.integers(0, 60, (count, 1, 4, 4))).astype("uint8"), y
        )

    return ClientData(some(samples), some(4), some(8))


def client_of(id: str) -> Client:
    return Client(id, data_of(id), CLASSES, batch_size=8, run=1)


# (mode, report, payload) -> what is sent instead
Tamper = Callable[[str, Report, bytes], list[tuple[Report, bytes]]]


def unchanged(mode: str, report: Report, payload: bytes) -> list[tuple[Report, bytes]]:
    return [(report, payload)]


@dataclass
class ScriptedDevice:
    """A full device that follows the protocol; `tamper` may change, drop or duplicate its messages, `delay_s` makes it a straggler."""

    connect_to: ServerConnect
    topics: Topics
    id: str
    tamper: Tamper = unchanged
    delay_s: float = 0.0
    tier: str = "full"
    boot: str = "b1"
    chunk_bytes: int = 1024
    chunks_first: bool = True
    samples: int = 20  # announced in the capability
    acks: list[Ack] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)  # hashes of the broadcasts
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._rounds: dict[str, Round] = {}
        self._own: dict[str, Any] = {}
        self._down: dict[str, Assembly] = {}
        self._broadcasts: dict[str, bytes] = {}  # of the last assignment
        self._fetching: list[str] = []
        self._unacknowledged: dict[str, tuple[str, int, Report, bytes]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._transport = self.connect()
        self._thread.start()

    def connect(self) -> Transport:
        will = Packet(self.topics.up(self.id, "state"), encode(DeviceState("lost", self.boot)), retain=True)
        return self.connect_to(self.id, will, self._events.put)

    def _on_connected(self) -> None:
        """After every connection: subscribe, publish capability and state, send unacknowledged reports again."""
        for pattern in (self.topics.round("+"), self.topics.down(self.id, "#"), *self._fetching):
            self._transport.subscribe(pattern)
        capability = Capability(self.tier, "test", "3", samples=self.samples)  # type: ignore[arg-type]
        self.send(self.topics.up(self.id, "meta"), encode(capability), retain=True)
        self.send(self.topics.up(self.id, "state"), encode(DeviceState("ready", self.boot)), retain=True)
        for unsent in list(self._unacknowledged.values()):
            self.report(*unsent)

    def send(self, topic: str, payload: bytes, **fields: Any) -> None:
        self._transport.publish(Packet(topic, payload, **fields))

    def crash(self) -> None:
        self._transport.close(clean=False)

    def reboot(self, boot: str) -> None:
        """Restart as another process, with the stored personal parts."""
        self.crash()
        self.boot = boot
        self._transport = self.connect()

    def close(self) -> None:
        self._transport.close()
        self._events.put(None)
        self._thread.join(60)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                if isinstance(event, Connected):
                    self._on_connected()
                elif isinstance(event, Packet) and event.payload:
                    self._take(event)
            except BaseException as error:
                self.failures.append(error)

    def _take(self, packet: Packet) -> None:
        address = self.topics.parse(packet.topic)
        match address.kind:
            case "round":
                self._rounds[address.path[0]] = decode(packet.payload, Round)
            case "ack":
                self.acks.append(decode(packet.payload, Ack))
                self._unacknowledged.pop(self.acks[-1].id, None)
            case "art":
                self._fetched(address.path[0], int(address.path[2]), packet.payload)
            case "assignment":
                assignment = decode(packet.payload, Assignment)
                self.assignments.append(assignment)
                if assignment.mode in REPORT_KINDS:
                    self._fetch(assignment)

    def _fetch(self, assignment: Assignment) -> None:
        """Fetch the broadcasts that are not there yet, one after the other, then do the work."""
        blobs = [blob for blob in (assignment.before, assignment.down) if blob]
        missing = next((blob for blob in blobs if blob.sha256 not in self._broadcasts), None)
        if missing is None:
            downs = {blob.sha256: self._broadcasts[blob.sha256] for blob in blobs}
            self._broadcasts = downs
            self._work(assignment, downs)
            return
        self._down[missing.sha256] = Assembly(missing)
        self._current = assignment
        groups = range(-(-len(missing.chunks) // GROUP))
        self._fetching = [self.topics.chunk_group(missing.sha256, group) for group in groups]
        for pattern in self._fetching:
            self._transport.subscribe(pattern)

    def _fetched(self, sha256: str, index: int, payload: bytes) -> None:
        if (assembly := self._down.get(sha256)) and assembly.add(index, payload):
            del self._down[sha256]
            for pattern in self._fetching:
                self._transport.unsubscribe(pattern)
            self._fetching = []
            self.fetched.append(sha256)
            self._broadcasts[sha256] = assembly.join()
            self._fetch(self._current)

    def _work(self, assignment: Assignment, downs: Mapping[str, bytes]) -> None:
        time.sleep(self.delay_s)
        method = build_method(self._rounds[assignment.run_id].spec).at(assignment.round)
        before, parts = (
            from_arrays(tensors.unpack(downs[blob.sha256])) if blob else {}
            for blob in (assignment.before, assignment.down)
        )
        own = self._own.get("own") or steps.start_own(method, self.id)
        client, found, up = client_of(self.id), {}, {}
        if assignment.mode == "evaluate":
            found = client.evaluate(method, parts, own)
        elif assignment.mode == "compare":
            found = client.compare(method, steps.paired(before, parts), own)
        else:
            update, self._own["own"] = getattr(client, assignment.mode)(method, assignment.round, parts, own)
            self._own[f"after {assignment.round}"] = self._own["own"]
            found, up = update.metrics, update.parts
        payload = tensors.pack(to_arrays(up)) if up else b""
        blob = describe(payload, self.chunk_bytes) if up else None
        compression = method.compression.kind if up else "none"
        report = Report(
            assignment.id, REPORT_KINDS[assignment.mode], self.boot, 20, found, blob, compression=compression
        )  # type: ignore[arg-type]
        for sent, content in self.tamper(assignment.mode, report, payload):
            self._unacknowledged[sent.id] = (assignment.run_id, assignment.round, sent, content)
            self.report(assignment.run_id, assignment.round, sent, content)

    def report(self, run_id: str, round: int, report: Report, payload: bytes) -> None:
        """Send a report and its chunks, in the order set by `chunks_first`."""
        packet = Packet(self.topics.up(self.id, "rpt", run_id, round), encode(report))
        if not self.chunks_first:
            self._transport.publish(packet)
        for index, chunk in enumerate(split(payload, self.chunk_bytes)):
            topic = self.topics.up(self.id, "blob", report.id, index)
            self._transport.publish(Packet(topic, bytes(chunk), content_type=SAFETENSORS))
        if self.chunks_first:
            self._transport.publish(packet)


@dataclass
class ScriptedHead:
    """A head-only device that follows the protocol: checks the signed metadata, pretends to fit a head, and reports it."""

    connect_to: ServerConnect
    topics: Topics
    id: str
    folder: Path
    after: float = 0.75
    silent: bool = False  # sends no reports
    error: str = ""  # of every report
    delay_s: float = 0.0  # before a report
    boot: str = "h1"
    served: list[int] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._files: dict[str, bytes] = {}
        self._trust = Trust(self.folder / self.id, trust_on_first_use=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        will = Packet(self.topics.up(self.id, "state"), encode(DeviceState("lost", self.boot)), retain=True)
        self._transport = self.connect_to(self.id, will, self._events.put)
        for pattern in (self.topics.tuf("+"), self.topics.down(self.id, "#")):
            self._transport.subscribe(pattern)
        capability = Capability("head", "test", "3", samples=9, head="svm")
        self._publish(self.topics.up(self.id, "meta"), capability, retain=True)
        self._publish(self.topics.up(self.id, "state"), DeviceState("ready", self.boot), retain=True)
        self._thread.start()

    def close(self) -> None:
        self._transport.close()
        self._events.put(None)
        self._thread.join(60)

    def _publish(self, topic: str, message: Any, **fields: Any) -> None:
        self._transport.publish(Packet(topic, encode(message), **fields))

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            if isinstance(event, Packet) and event.payload:
                try:
                    self._take(event)
                except BaseException as error:
                    self.failures.append(error)

    def _take(self, packet: Packet) -> None:
        address = self.topics.parse(packet.topic)
        if address.kind == "tuf":
            self._files[address.path[0]] = packet.payload
        elif address.kind == "ack":
            self.acks.append(decode(packet.payload, Ack))
        elif (
            address.kind == "assignment"
            and (assignment := decode(packet.payload, Assignment)).mode == "serve"
        ):
            self._serve(assignment)

    def _serve(self, assignment: Assignment) -> None:
        manifests = {found.release: found for found in self._trust.refresh(self._files.__getitem__)}
        extractor = manifests[assignment.release].extractor.sha256
        before = {metrics.PERSONAL_BEFORE: self.after / 2} if self.served else {}
        found = {**before, metrics.PERSONAL_AFTER: self.after, metrics.TEST_SAMPLES: 4.0}
        report = Report(
            id=assignment.id,
            kind="head",
            boot=self.boot,
            samples=9,
            metrics={} if self.error else found,
            error=self.error,
            release=assignment.release,
            extractor=extractor,
            head="svm",
            seconds=0.5,
            bytes_down=100,
            bytes_up=10,
        )
        self.served.append(assignment.release)
        if self.silent:
            return
        time.sleep(self.delay_s)
        self._publish(self.topics.up(self.id, "rpt", assignment.run_id, assignment.round), report)
