"""A scripted server for the devices' tests: it publishes, records everything that devices publish, and acknowledges."""

import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from edge_fl.blob import Assembly, Blob, describe, split
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import MESSAGES, Ack, Assignment, Report, Round, ServerState, decode, encode
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import UNTYPED, Connect, Event, Packet
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_server.release.repository import Repository

TOPICS = Topics("test")
WAIT_S = 90.0
M = TypeVar("M", bound=Struct)


class ScriptedServer:
    """`received` contains everything that devices published, in order, as (address, payload)."""

    def __init__(self, connect: Connect, name: str = "server") -> None:
        self.received: list[tuple[Address, bytes]] = []
        self._news = threading.Condition()
        self._retained: set[str] = set()
        will = Packet(TOPICS.server("state"), encode(ServerState(False, "s1")), retain=True)
        self.transport = connect(name, will, self._on_event)
        self.transport.wait_connected(WAIT_S)
        self.transport.subscribe(TOPICS.up("+", "#"))
        self._version = 0

    def online(self, online: bool = True, boot: str = "s1") -> None:
        self.publish(TOPICS.server("state"), ServerState(online, boot), retain=True)

    def publish(self, topic: str, message: Struct, *, retain: bool = False) -> None:
        self.transport.publish(Packet(topic, encode(message), retain))

    def round(self, round: Round) -> None:
        self.publish(TOPICS.round(round.run_id), round, retain=True)

    def chunks(
        self,
        payload: bytes,
        blob: Blob | None = None,
        *,
        leave_out: Collection[int] = (),
        spoil: Collection[int] = (),
    ) -> Blob:
        """Publish a blob's chunks, retained; some left out or corrupt."""
        blob = blob or describe(payload)
        for index, chunk in enumerate(split(payload, blob.chunk_bytes)):
            if index not in leave_out:
                content = b"x" * len(chunk) if index in spoil else bytes(chunk)
                self.transport.publish(
                    Packet(TOPICS.chunk(blob.sha256, index), content, True, content_type=UNTYPED)
                )
        return blob

    def metadata(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Retains signed metadata, in the order given."""
        for name, payload in files:
            self.transport.publish(Packet(TOPICS.tuf(name), payload, retain=True))

    def release(self, repository: Repository, manifest: Manifest, payload: bytes) -> None:
        """Publishes a release as a server does: chunks first, then metadata, the timestamp last."""
        self.chunks(payload, manifest.extractor)
        new = repository.publish(manifest)
        self.metadata([file for file in repository.files() if file not in new])
        self.metadata(new)

    def assignment(self, device: str, mode: Any, **fields: Any) -> Assignment:
        self._version += 1
        assignment = Assignment(self._version, mode, **fields)
        self.publish(TOPICS.down(device, "assignment"), assignment, retain=True)
        return assignment

    def ack(self, device: str, id: str, status: Any = "accepted") -> None:
        self.publish(TOPICS.down(device, "ack"), Ack(id, status))

    def wait(
        self, claim: Callable[[list[tuple[Address, bytes]]], Any], what: str = "", deadline_s: float = WAIT_S
    ) -> Any:
        """The first true value of `claim(received)`."""
        with self._news:
            if not self._news.wait_for(lambda: claim(self.received), deadline_s):
                last = [f"{a.kind} {p[:200]!r}" for a, p in self.received if a.kind != "blob"][-20:]
                raise AssertionError(f"did not receive {what or claim} in {deadline_s} s, but {last}")
            return claim(self.received)

    def messages(self, device: str, kind: str) -> list[Any]:
        return [
            decode(p, MESSAGES[kind])
            for a, p in list(self.received)
            if a.device == device and a.kind == kind and p
        ]

    def wait_for(
        self,
        device: str,
        kind: str,
        fits: Callable[[Any], bool] = lambda message: True,
        number: int = 1,
        deadline_s: float = WAIT_S,
    ) -> Any:
        """The `number`-th message of a device that fits."""

        def found(_: Any) -> Any:
            fitting = [message for message in self.messages(device, kind) if fits(message)]
            return fitting[number - 1] if len(fitting) >= number else None

        return self.wait(found, f"{kind} of {device}", deadline_s)

    def blob(self, device: str, report: Report) -> bytes:
        """The blob that came with a report."""
        assert report.blob
        assembly = Assembly(report.blob)
        for address, payload in self.received:
            if address.kind == "blob" and (address.device, address.path[0]) == (device, report.id):
                assembly.add(int(address.path[1]), payload)
        return assembly.join()

    def leave(self) -> None:
        """Clears everything that is retained, for the next test, and disconnects."""
        self.transport.subscribe(f"{TOPICS.root}/#")
        self.transport.publish(
            Packet(TOPICS.down("leaving", "echo"), b"-")
        )  # arrives after all retained messages
        self.wait(
            lambda received: any(address.device == "leaving" for address, _ in received), "its own echo"
        )
        for topic in tuple(self._retained):
            self.transport.publish(Packet(topic, b"", retain=True))
        self.transport.drain(WAIT_S)
        self.transport.close()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Packet):
            with self._news:
                if event.retain and event.payload:
                    self._retained.add(event.topic)
                self.received.append((TOPICS.parse(event.topic), event.payload))
                self._news.notify_all()


@contextmanager
def running(*devices: Device, connect: Connect, workers: int = 1):  # type: ignore[no-untyped-def]
    """Run the devices in a thread; at the end they disconnect cleanly."""
    runner = Runner(workers=workers)
    for device in devices:
        runner.add(device, connect)
    thread = threading.Thread(target=partial(runner.run, deadline_s=120), daemon=True)
    thread.start()
    try:
        yield runner
    finally:
        runner.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def eventually(claim: Callable[[], Any], deadline_s: float = WAIT_S) -> Any:
    """The first true value of `claim()`."""
    until = time.monotonic() + deadline_s
    while not (found := claim()):
        assert time.monotonic() < until, "did not happen"
        time.sleep(0.01)
    return found
