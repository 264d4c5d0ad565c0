"""Secure sums between the real server and real agents over a broker: masked, plain, with drop-outs, and what the broker sees."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl.errors import ConfigError, SecureSumError
from edge_fl.failures import Failure
from edge_fl.learn.codec import differential_privacy
from edge_fl.secure import fixed_point
from edge_fl.secure.floors import DEFAULT, SumFloors
from edge_fl.secure.server import Sum
from edge_fl.seeds import generator
from edge_fl.wire import identity
from edge_fl.wire.messages import Capability, SumReply, SumRequest, decode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices.agent import events
from edge_fl_devices.agent.effects import Job
from edge_fl_devices.agent.events import Event, Failed
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.runtime.connection import fleet_connector
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.worker import Worker
from edge_fl_server.mqtt import secure_sums
from edge_fl_server.mqtt.connection import ReceivedMessage, ServerConnection
from edge_fl_server.mqtt.connector import connector
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.secure_sums import SecureSums, SumOptions
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.director import Director
from tests.edge_fl.secure.cohorts import encodings
from tools.memory_broker import InMemoryBroker, InMemoryTransport

TOPICS = Topics("main")
QUICK = AgentLimits(settle_s=0.05, return_s=0.1)
Vector = NDArray[np.float64]


@dataclass(eq=False)
class Offering(Worker):
    """A worker that has one vector to offer. `before` runs in the worker thread before it is offered.

    known: releases with a sum for which the vector left; settled: the devices in each sum that ended.
    """

    vector: Vector | None = None
    before: Callable[[], None] = lambda: None
    known: list[int] = field(default_factory=list)
    settled: list[list[str]] = field(default_factory=list)

    def perform(self, job: Job, material: Any) -> Event:
        return Failed(Failure.UNSUPPORTED_TIER)

    def offer(self, id: str, request: SumRequest) -> Vector | None:
        self.before()
        return self.vector

    def commit(self, id: str, request: SumRequest, *, leaves: bool) -> None:
        self.known.append(request.release)

    def settle(self, id: str, devices: Collection[str]) -> None:
        self.settled.append(list(devices))


@dataclass
class Fleet:
    """A server and devices at a broker; `packets`: everything that the broker passed on. With certificates the server signs."""

    folder: Path
    connect: Any
    connect_server: Any
    identities: Path | None
    floors: SumFloors = DEFAULT
    packets: list[Packet] = field(default_factory=list)
    devices: dict[str, Device] = field(default_factory=dict)
    workers: dict[str, Offering] = field(default_factory=dict)

    @contextmanager
    def running(self, vectors: Mapping[str, Vector | None]) -> Iterator[tuple[Server, SecureSums, Runner]]:
        runner = Runner(workers=4)
        repository = Repository(self.folder / "releases") if self.identities else None
        director = Director(repository, TOPICS.fleet) if repository else None
        for name, vector in vectors.items():
            trust = Trust(self.folder / name / "tuf", repository.root_bytes) if repository else None
            self.workers[name] = Offering(name, Store(self.folder / name), vector=vector, verifies=trust)
            folder = self.identities / name if self.identities else None
            can = Capability("head", "test", "3")
            self.devices[name] = Device(
                name,
                TOPICS,
                can,
                self.workers[name],
                limits=QUICK,
                identity=folder,
                sum_floors=self.floors,
            )
        ca = (
            (self.identities / next(iter(vectors)) / identity.CA_FILE).read_bytes()
            if self.identities
            else None
        )
        with (
            Journal() as journal,
            connected(ServerConnection(self.connect_server, journal, director=director)) as server,
        ):
            for device in self.devices.values():
                runner.add(device, self.connect)
            thread = threading.Thread(target=partial(runner.run, deadline_s=1000), daemon=True)
            thread.start()
            try:
                server.roster.wait_for(heads=len(vectors), deadline_s=90)
                yield server, SecureSums(server, ca), runner
            finally:
                runner.stop()
                thread.join(90)


def vectors_of(count: int, length: int) -> dict[str, Vector]:
    rng = generator(5, "secure sum")
    return {f"pi-{number:02}": rng.normal(size=length) * 100 for number in range(count)}


@contextmanager
def recorded(connect: Any, packets: list[Packet]) -> Iterator[None]:
    """Record everything below the fleet's root."""
    transport = connect(
        "sniffer", None, lambda event: packets.append(event) if isinstance(event, Packet) else None
    )
    transport.wait_connected(60)
    transport.subscribe(f"{TOPICS.root}/#")
    transport.drain(60)
    yield
    transport.close()


@contextmanager
def in_memory(folder: Path, names: Any = (), floors: SumFloors = DEFAULT) -> Iterator[Fleet]:
    """An in-memory broker; with `names` their devices have certificates."""
    if names:
        Authority.make(folder / "home").bake({name: folder / "ids" / name for name in names})
    broker = InMemoryBroker()
    connect = partial(InMemoryTransport, broker)
    fleet = Fleet(folder, connect, connect, folder / "ids" if names else None, floors)
    with recorded(connect, fleet.packets):
        yield fleet
    broker.close()


def leaving(connect: Any, names: Any, stage: str = "vector") -> Any:
    """Connect devices, of which `names` lose power when they are about to send their masked vector, or at another stage."""

    def connect_leaving(name: str, will: Packet | None, deliver: Any) -> Any:
        transport = connect(name, will, deliver)
        publish = transport.publish

        def publish_or_leave(packet: Packet) -> None:
            if packet.topic == TOPICS.up(name, "sum") and decode(packet.payload, SumReply).stage == stage:
                transport.close(clean=False)
            publish(packet)

        if name in names:
            transport.publish = publish_or_leave
        return transport

    return connect_leaving


def require_hidden(packets: list[Packet], vectors: Mapping[str, Vector]) -> None:
    """No packet contains numbers of a vector in any encoding."""
    traffic = b"\0".join(packet.payload for packet in packets)
    for vector in vectors.values():
        assert not any(text in traffic for text in encodings(vector, len(vectors)))


def stages(packets: list[Packet], device: str) -> list[str]:
    """The stages that a device answered."""
    topic = TOPICS.up(device, "sum")
    return [decode(packet.payload, SumReply).stage for packet in packets if packet.topic == topic]


def test_masked_and_plain_sums_of_thirty_devices_agree(tmp_path: Path) -> None:
    vectors = vectors_of(30, 33_000)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with in_memory(tmp_path / "a", vectors) as fleet, fleet.running(vectors) as (_, sums, _):
        masked = sums.collect("statistics", 7, 33_000)
        assert all(worker.known == [7] for worker in fleet.workers.values())
        largest = max(len(packet.payload) for packet in fleet.packets)
        sent = sum(len(packet.payload) for packet in fleet.packets if "/pi-00/up/sum/" in packet.topic)
    with in_memory(tmp_path / "b") as fleet, fleet.running(vectors) as (_, sums, _):
        plain = sums.collect("statistics", 7, 33_000, SumOptions(masked=False))
    assert masked.devices == plain.devices == tuple(vectors)
    assert np.abs(masked.vector - plain.vector).max() <= 1e-6
    assert np.abs(masked.vector - sum(vectors.values())).max() <= 1e-6
    assert sent == 33_000 * fixed_point.BYTES <= 200_000
    assert largest <= 64 * 1024


def test_the_recording_shows_plain_vectors_and_no_masked_ones(tmp_path: Path) -> None:
    vectors = vectors_of(6, 100)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with in_memory(tmp_path / "a", vectors) as fleet, fleet.running(vectors) as (_, sums, _):
        sums.collect("statistics", 7, 100)
        require_hidden(fleet.packets, vectors)
    with in_memory(tmp_path / "b") as fleet, fleet.running(vectors) as (_, sums, _):
        sums.collect("statistics", 7, 100, SumOptions(masked=False))
        with pytest.raises(AssertionError):
            require_hidden(fleet.packets, vectors)


def test_a_sum_completes_when_nine_of_thirty_devices_disappear_before_the_upload(tmp_path: Path) -> None:
    vectors = vectors_of(30, 500)
    gone = list(vectors)[::3][:9]
    with in_memory(tmp_path, vectors) as fleet:
        fleet.connect = leaving(fleet.connect, gone)
        with fleet.running(vectors) as (_, sums, _):
            found = sums.collect("statistics", 7, 500, SumOptions(lost_s=0.2))
    remaining = [name for name in vectors if name not in gone]
    assert list(found.devices) == remaining
    assert np.abs(found.vector - sum(vectors[name] for name in remaining)).max() <= 1e-6
    require_hidden(fleet.packets, vectors)
    assert {tuple(stages(fleet.packets, name)) for name in gone} == {("keys", "shares")}
    assert all(worker.known == [7] for worker in fleet.workers.values())  # before it is sent


def test_a_sum_ends_by_name_when_eighteen_of_thirty_devices_disappear_before_the_upload(
    tmp_path: Path,
) -> None:
    vectors = vectors_of(30, 500)
    with in_memory(tmp_path, vectors) as fleet:
        fleet.connect = leaving(fleet.connect, list(vectors)[:18])
        with (
            fleet.running(vectors) as (_, sums, _),
            pytest.raises(
                SecureSumError, match="only 12 of 30 devices remained, 20 needed; no statistic was revealed"
            ),
        ):
            sums.collect("statistics", 7, 500, SumOptions(lost_s=0.2))
        assert all(worker.known == [7] for worker in fleet.workers.values())
        assert all("reveal" not in stages(fleet.packets, name) for name in vectors)
        require_hidden(fleet.packets, vectors)


@pytest.mark.parametrize("stage", ["signature", "reveal"])
def test_a_device_that_disappears_after_the_upload_knows_that_its_vector_is_in_the_sum(
    tmp_path: Path, stage: str
) -> None:
    vectors = vectors_of(6, 10)
    with in_memory(tmp_path, vectors) as fleet:
        fleet.connect = leaving(fleet.connect, ["pi-03"], stage)
        with fleet.running(vectors) as (_, sums, _):
            found = sums.collect("statistics", 7, 10, SumOptions(lost_s=0.2))
    assert found.devices == tuple(vectors)
    assert np.abs(found.vector - sum(vectors.values())).max() <= 1e-6
    assert fleet.workers["pi-03"].known == [7]


def test_devices_that_offer_nothing_or_fail_take_no_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vectors: dict[str, Vector | None] = {
        **vectors_of(9, 10),
        "pi-00": None,
        "pi-01": np.ones(9),
        "pi-02": np.full(10, np.inf),
    }

    def fail() -> None:
        raise ValueError("a bug in an offer")

    with (
        in_memory(tmp_path, vectors, SumFloors(minimum=3)) as fleet,
        fleet.running(vectors) as (_, sums, runner),
    ):
        runner.deliver(fleet.devices["pi-04"], events.BudgetChanged("cpu_budget"))
        fleet.workers["pi-03"].before = fail
        caplog.set_level(logging.INFO)
        with pytest.raises(SecureSumError, match="only 4 of 5 devices remained, 5 needed"):
            sums.collect("statistics", 7, 10)
        found = sums.collect("statistics", 7, 10, SumOptions(minimum=3))
        assert {name: stages(fleet.packets, name)[-1] for name in list(vectors)[:5]} == dict.fromkeys(
            list(vectors)[:5], "declined"
        )
    assert found.devices == ("pi-05", "pi-06", "pi-07", "pi-08")
    text = caplog.text
    assert (
        "without pi-00 (nothing), pi-01 (wrong_length), pi-02 (out_of_range), pi-03 (error), pi-04 (nothing)"
        in text
    )
    assert "pi-01: secure sum" in text and "9 numbers, 10 requested" in text


def test_a_device_that_is_too_slow_has_dropped_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the first stage is up as soon as all others have replied."""
    vectors, release = vectors_of(6, 10), threading.Event()
    options, replied = SumOptions(stage_s=3600.0), set[str]()

    def monotonic() -> float:
        return time.monotonic() + options.stage_s * (len(replied) == 5)

    take = SecureSums._take

    def noted(self: SecureSums, opened: Any, received: ReceivedMessage) -> None:
        take(self, opened, received)
        replied.add(received.address.device)

    monkeypatch.setattr(secure_sums, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(SecureSums, "_take", noted)
    with in_memory(tmp_path, vectors) as fleet, fleet.running(vectors) as (_, sums, _):
        fleet.workers["pi-05"].before = lambda: release.wait(90) and None
        found = sums.collect("statistics", 7, 10, options)
        release.set()
    assert found.devices == tuple(list(vectors)[:5])


def test_what_is_not_possible_is_not_requested(tmp_path: Path) -> None:
    vectors = vectors_of(6, 10)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with in_memory(tmp_path / "a") as fleet, fleet.running(vectors) as (_, sums, _):
        with pytest.raises(
            SecureSumError, match="no certificates, which masked sums require; nothing was requested"
        ):
            sums.collect("statistics", 7, 10)
        with pytest.raises(SecureSumError, match="2 devices are online, 5 needed; nothing was requested"):
            sums.collect("statistics", 7, 10, SumOptions(masked=False), devices=["pi-00", "pi-01", "pi-99"])
        with pytest.raises(ConfigError, match=r"secure sum: minimum = 2: .*3"):
            sums.collect("statistics", 7, 10, SumOptions(minimum=2, masked=False))
        with pytest.raises(ConfigError, match="noise_multiplier without clip"):
            SumOptions(noise_multiplier=1.0)
        assert not any(packet.topic.endswith("/sum") for packet in fleet.packets)
    with in_memory(tmp_path / "b", vectors) as fleet, fleet.running(vectors) as (_, sums, _):
        with pytest.raises(SecureSumError, match="0 devices take part"):
            sums.collect("statistics", 7, 10, SumOptions(masked=False))
        assert {reply for name in vectors for reply in stages(fleet.packets, name)} == {"declined"}


def test_epsilon_of_a_noisy_sum_is_reported(tmp_path: Path) -> None:
    vectors = vectors_of(5, 10)
    with in_memory(tmp_path, vectors) as fleet, fleet.running(vectors) as (_, sums, _):
        found = sums.collect("statistics", 7, 10, SumOptions(clip=1.0, noise_multiplier=4.0, delta=1e-5))
        assert sums.collect("statistics", 7, 10).epsilon == 0.0
    spent = (differential_privacy.SENSITIVITY / 4.0) ** 2
    assert found.epsilon == pytest.approx(differential_privacy.epsilon(spent, 1e-5)) and 1 < found.epsilon < 5
    assert np.abs(found.vector).max() < 60  # clipped: without clip and noise about 200


def in_groups(sums: SecureSums, length: int, options: SumOptions) -> tuple[list[Sum], list[str]]:
    """The sums of all groups, and the errors of those that failed."""
    found = list(sums.collect_groups("statistics", 7, length, options))
    return [one for one in found if isinstance(one, Sum)], [
        one.message for one in found if isinstance(one, SecureSumError)
    ]


def test_groups_add_up_every_device_once_and_ask_no_other_one(tmp_path: Path) -> None:
    vectors: dict[str, Vector | None] = {**vectors_of(23, 10)}
    vectors |= dict.fromkeys(list(vectors)[::5])  # five have nothing to add
    offered = {name: vector for name, vector in vectors.items() if vector is not None}
    with in_memory(tmp_path, vectors) as fleet, fleet.running(vectors) as (_, sums, _):
        found, failed = in_groups(sums, 10, SumOptions(group=7))
    assert not failed and sorted(len(one.devices) for one in found) == [6, 6, 6]
    assert sorted(name for one in found for name in one.devices) == list(offered)
    assert np.abs(sum(one.vector for one in found) - sum(offered.values())).max() <= 1e-6
    assert len({one.id for one in found}) == 3
    require_hidden(fleet.packets, offered)
    for name, vector in vectors.items():
        replied = stages(fleet.packets, name)
        assert replied == (["declined"] if vector is None else ["keys", "keys", *replied[2:]])


def test_a_group_that_fails_loses_its_own_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = vectors_of(18, 10)
    monkeypatch.setattr(secure_sums, "groups_of", lambda names, *_: [names[0:6], names[6:12], names[12:18]])
    with in_memory(tmp_path, vectors) as fleet:
        fleet.connect = leaving(fleet.connect, ["pi-06", "pi-07"])
        with fleet.running(vectors) as (_, sums, _):
            found, failed = in_groups(sums, 10, SumOptions(lost_s=0.2, group=6))
    assert failed == ["only 4 of 6 devices remained, 5 needed"]
    assert [one.devices for one in found] == [tuple(vectors)[:6], tuple(vectors)[12:]]
    assert fleet.workers["pi-08"].settled == [[]] and len(fleet.workers["pi-00"].settled[0]) == 6


def test_fewer_willing_devices_than_the_minimum_send_nothing(tmp_path: Path) -> None:
    vectors: dict[str, Vector | None] = {**vectors_of(9, 10)}
    vectors |= dict.fromkeys(list(vectors)[:5])
    with (
        in_memory(tmp_path, vectors) as fleet,
        fleet.running(vectors) as (_, sums, _),
        pytest.raises(SecureSumError, match=r"4 devices take part, .* \(5 with nothing to add\)"),
    ):
        in_groups(sums, 10, SumOptions(group=5))
    assert not any("shares" in stages(fleet.packets, name) for name in vectors)


@pytest.mark.parametrize(
    ("devices", "minimum", "sizes"),
    [
        (5, 5, [5]),
        (40, 5, [40]),
        (41, 5, [21, 20]),
        (250, 5, [36] * 5 + [35] * 2),
        (1000, 5, [40] * 25),
        (70, 30, [35, 35]),
        (100, 60, [100]),
        (130, 60, [65, 65]),
        (119, 60, [100]),
    ],
)
def test_groups_are_balanced_and_within_the_limits(devices: int, minimum: int, sizes: list[int]) -> None:
    names = [f"pi-{number}" for number in range(devices)]
    groups = secure_sums.groups_of(names, minimum)
    assert [len(group) for group in groups] == sizes
    members = [name for group in groups for name in group]
    assert len(set(members)) == len(members) and set(members) <= set(names)
    if devices > 5:
        assert groups != secure_sums.groups_of(names, minimum)  # drawn at random


@pytest.mark.broker
def test_a_sum_over_mosquitto_with_certificates(mosquitto_program: Program, tmp_path: Path) -> None:
    """Devices with their own certificates, of which two lose power; the operator records everything that the broker passes on."""
    vectors = vectors_of(9, 20_000)
    authority, ids = Authority.make(tmp_path / "home"), tmp_path / "ids"
    authority.bake({name: ids / name for name in vectors})
    settings = BrokerSettings(
        tmp_path / "mosquitto", port=0, certificates=register_sync.certificates(authority, "127.0.0.1")
    )
    with Mosquitto(register_sync.with_register(settings, authority), mosquitto_program) as broker:
        port = broker.settings.port
        _, connect = fleet_connector("127.0.0.1", port, ids, len(vectors))
        connect_server = connector("127.0.0.1", port, authority.home / "server")
        operator = identity.read(authority.home / "operator").endpoint("127.0.0.1", port)
        fleet = Fleet(tmp_path, leaving(connect, ["pi-02", "pi-06"]), connect_server, ids)
        with (
            recorded(
                lambda name, will, deliver: MqttTransport(operator, "operator", will, deliver), fleet.packets
            ),
            fleet.running(vectors) as (_, sums, _),
        ):
            found = sums.collect("statistics", 7, 20_000, SumOptions(lost_s=0.2))
            chunks = len([packet for packet in fleet.packets if "/up/sum/" in packet.topic])
            grouped, failed = in_groups(sums, 20_000, SumOptions(minimum=5, group=6))
    remaining = [name for name in vectors if name not in ("pi-02", "pi-06")]
    assert list(found.devices) == remaining
    assert np.abs(found.vector - sum(vectors[name] for name in remaining)).max() <= 1e-6
    assert chunks == 7 * 2
    require_hidden(fleet.packets, vectors)
    assert not failed and [one.devices for one in grouped] == [
        tuple(remaining)
    ]  # seven are too few for two groups
    assert np.abs(grouped[0].vector - found.vector).max() <= 2e-6
