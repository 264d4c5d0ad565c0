"""Attacks on secure sums against real agents over mosquitto, with certificates and access rules: by the server, a releaser and the broker.

The attack: two sums at the same time, over six devices and over five of them. Their difference would be the vector of the sixth.
"""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from numpy.typing import NDArray

from edge_fl.errors import SecureSumError
from edge_fl.heads.class_statistics import sums
from edge_fl.secure.floors import DEFAULT
from edge_fl.secure.server import SumServer
from edge_fl.wire import identity
from edge_fl.wire.messages import SumReply, SumRequest, SumStep, decode, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices.agent.state import Phase
from edge_fl_devices.runtime.connection import fleet_connector
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.class_statistics import NEXT, StatisticsOffer, StatisticsOffers
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import connector, fleet_authorities
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.secure_sums import SecureSums, SumOptions
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.registry import Database
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.director import Director
from tests.devices import graphs
from tests.devices.scripted import eventually
from tests.mixed.attacked_broker import serve, signing_device

TOPICS = Topics("main")
NAMES = [f"pi-0{number}" for number in range(1, 7)]
VICTIM = NAMES[-1]
LENGTH = sums.shape_of(2, graphs.DIM).length
QUICK = SumOptions(stage_s=20.0)
Vector = NDArray[np.float64]


@dataclass
class Fleet:
    """Six devices that serve a release that asks for sums, their server, and everything on disk in `home`."""

    home: Path
    port: int
    authority: Authority
    stack: ExitStack
    devices: dict[str, Device] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.repository = Repository(self.home / "releases")
        self.db = Database.open(self.home / "registry.sqlite")
        self.stack.callback(self.db.close)
        _, self.connect = fleet_connector("127.0.0.1", self.port, self.home / "ca", len(NAMES))
        self.director = Director(self.repository, "main")
        journal = self.stack.enter_context(Journal(self.db, "main"))
        authorities = fleet_authorities(self.authority.home / "server")
        connect = connector("127.0.0.1", self.port, self.authority.home / "server")
        opened = connected(
            ServerConnection(connect, journal, director=self.director, authorities=authorities)
        )
        self.server: Server = self.stack.enter_context(opened)
        self.sums = SecureSums(self.server, (self.home / "ca" / VICTIM / identity.CA_FILE).read_bytes())
        self._stop: Any = lambda: None
        self.stack.callback(lambda: self._stop())

    def release(self, **changes: Any) -> int:
        """Publish a release and wait until all devices serve it."""
        payload = graphs.graph()
        number = self.repository.next_release()
        manifest = graphs.manifest_for(payload, release=number, **changes)
        transport = self.server.connection.transport
        assert transport
        Publisher(transport, TOPICS, self.repository).publish(manifest, {manifest.extractor.sha256: payload})
        for name in NAMES:
            serve(self.server, number, name)
        eventually(lambda: all(d.state.release == number and not d.state.work for d in self.devices.values()))
        return number

    def start(self, names: list[str] = NAMES) -> None:
        """Start devices, again after `crash`. One thread: their answers keep the order of the questions."""
        runner = Runner(workers=1)
        for name in names:
            self.devices[name] = signing_device(self.home, name)
            runner.add(self.devices[name], self.connect)
        thread = threading.Thread(target=partial(runner.run, deadline_s=1000), daemon=True)
        thread.start()
        before = self._stop

        def stop() -> None:
            before()
            runner.stop()
            thread.join(60)

        self._stop = stop
        self.server.roster.wait_for(heads=len(NAMES), deadline_s=60)

    def restart(self, name: str) -> None:
        """Cut the power of a device and start it again."""
        self.devices[name].crash()
        eventually(lambda: name not in self.server.roster.head_devices())
        self.start([name])
        eventually(lambda: self.settled(name))

    def settled(self, name: str) -> bool:
        """Whether a device is connected and has no work."""
        state = self.devices[name].state
        return state.phase is Phase.UP and not state.work

    def vectors(self) -> dict[str, Vector]:
        """What the devices have to offer."""
        found = {
            name: StatisticsOffers(self.home / name)._read(NEXT, StatisticsOffer) for name in self.devices
        }
        return {name: offer.vector for name, offer in found.items() if offer}


@pytest.fixture
def fleet(mosquitto_program: Program, tmp_path: Path) -> Iterator[Fleet]:
    authority = Authority.make(tmp_path / "home")
    authority.bake({name: tmp_path / "ca" / name for name in NAMES})
    authority.enrol_people("releaser", ["anna"], tmp_path / "people")
    settings = BrokerSettings(
        tmp_path / "mosquitto", port=0, certificates=register_sync.certificates(authority, "127.0.0.1")
    )
    settings = register_sync.with_register(settings, authority)
    with Mosquitto(settings, mosquitto_program) as broker, ExitStack() as stack:
        fleet = Fleet(tmp_path, broker.settings.port, authority, stack)
        fleet.start()
        yield fleet


class Attacker:
    """Drives sums of its own in the server's name. A `director` signs for it, if it has the key; it reads all that the broker passes on.

    publish: over the server's connection, as the server and the broker can, unless another one is given.
    """

    def __init__(
        self, fleet: Fleet, director: Director | None, publish: Callable[[Packet], None] | None = None
    ) -> None:
        self._director, self._probes, self._news = director, count(), threading.Condition()
        self.publish = publish or fleet.server.connection.publish_packet
        self._authorities = x509.load_pem_x509_certificates(
            (fleet.home / "ca" / VICTIM / identity.CA_FILE).read_bytes()
        )
        self.replies: list[tuple[str, SumReply | bytes, str, int]] = []
        self.steps: list[Packet] = []
        endpoint = identity.read(fleet.authority.home / "operator").endpoint("127.0.0.1", fleet.port)
        transport = MqttTransport(endpoint, "operator", None, self._record)
        fleet.stack.callback(transport.close)
        transport.wait_connected(30)
        transport.subscribe(f"{TOPICS.root}/#")
        transport.drain(30)

    def _record(self, event: object) -> None:
        if not isinstance(event, Packet) or not event.payload:
            return
        address = TOPICS.parse(event.topic)
        if address.kind == "sum":
            self.steps.append(event)
        elif address.kind == "sum_reply":
            self._add(address.device, decode(event.payload, SumReply), "", 0)
        elif address.kind == "sum_chunk":
            id, index = address.path
            self._add(address.device, event.payload, id, int(index))

    def _add(self, *reply: Any) -> None:
        with self._news:
            self.replies.append(reply)
            self._news.notify_all()

    def sum(self, id: str, release: int, names: list[str], **terms: Any) -> SumServer:
        request = SumRequest("statistics", release, LENGTH, **terms)
        return SumServer("main", id, request, names, self._authorities)

    def exchange(self, opened: SumServer, steps: Mapping[str, SumStep]) -> None:
        """Send the steps of a stage, and take the answers, if any: a device answers a probe that follows in any case."""
        probe, begin = f"probe-{next(self._probes)}", len(self.replies)
        for name, step in steps.items():
            signed = self._director.sign("sum", name, step, lasts=True) if self._director else step
            question = SumStep(probe, "open", opened.request)
            for one in (signed, question):
                self.publish(Packet(TOPICS.down(name, "sum"), encode(one)))

        def probed() -> set[str]:
            answers = [(d, r) for d, r, _, _ in self.replies[begin:] if isinstance(r, SumReply)]
            return {device for device, reply in answers if reply.id == probe}

        with self._news:
            assert self._news.wait_for(lambda: probed() == set(steps), 60), set(steps) - probed()
        for device, reply, id, index in self.replies[begin:]:
            if isinstance(reply, bytes):
                opened.take_chunk(device, id, index, reply)
            else:
                opened.take(device, reply)

    def declined(self, id: str) -> dict[str, str]:
        """The reasons of the devices that declined a sum."""
        found = [(d, r) for d, r, _, _ in self.replies if isinstance(r, SumReply) and r.id == id]
        return {device: reply.reason for device, reply in found if reply.stage == "declined"}


def advanced(opened: SumServer) -> dict[str, SumStep]:
    """The next steps; none where too few devices remain."""
    try:
        return opened.advance()
    except SecureSumError:
        return {}


def interleaved(attacker: Attacker, first: SumServer, second: SumServer, after: int) -> None:
    """Run two sums stage by stage; the second begins after so many stages of the first."""
    one, two = first.open(), {}
    for stage in range(12):
        if one:
            attacker.exchange(first, one)
            one = advanced(first)
        if stage == after:
            two = second.open()
        if two:
            attacker.exchange(second, two)
            two = advanced(second)


@pytest.mark.broker
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_server_that_runs_two_sums_at_the_same_time_learns_no_single_vector(
    fleet: Fleet, after: int
) -> None:
    release = fleet.release(sums=["statistics"])
    vectors = fleet.vectors()
    assert vectors.keys() == set(NAMES)
    attacker = Attacker(fleet, fleet.director)
    first = attacker.sum("a", release, NAMES)
    second = attacker.sum("b", release, NAMES[:-1])
    interleaved(attacker, first, second, after)
    results = [opened.result for opened in (first, second) if opened.result]
    assert len(results) == (after < 2)  # an opening ends the sum before it
    for result in results:
        expected = sum(vectors[name] for name in result.devices)
        np.testing.assert_allclose(result.vector, expected, atol=1e-5)
        assert not fleet.vectors().keys() & set(result.devices)


@pytest.mark.broker
@pytest.mark.parametrize("who", ["releaser", "broker"])
def test_who_has_no_online_key_gets_nothing_and_harms_no_sum(fleet: Fleet, who: str) -> None:
    release = fleet.release(sums=["statistics"])
    vectors = fleet.vectors()
    publish = None
    if who == "releaser":
        anna = identity.read(fleet.home / "people" / "releaser-anna")
        transport = MqttTransport(anna.endpoint("127.0.0.1", fleet.port), anna.name, None, lambda event: None)
        fleet.stack.callback(transport.close)
        transport.wait_connected(30)
        publish = transport.publish
    attacker = Attacker(fleet, None, publish)
    first, second = attacker.sum("a", release, NAMES), attacker.sum("b", release, NAMES[:-1])
    interleaved(attacker, first, second, 0)
    assert first.result is None and second.result is None
    assert attacker.declined("a") == dict.fromkeys(NAMES, "unsigned")
    found = fleet.sums.collect("statistics", release, LENGTH, QUICK)
    np.testing.assert_allclose(found.vector, sum(vectors.values()), atol=1e-5)


@pytest.mark.broker
def test_a_signed_opening_is_no_use_a_second_time(fleet: Fleet) -> None:
    """The broker records the messages of a sum and plays them again, also to a device that has restarted."""
    release = fleet.release(sums=["statistics"])
    attacker = Attacker(fleet, None)
    assert fleet.sums.collect("statistics", release, LENGTH, QUICK).devices == tuple(NAMES)

    def of_victim() -> list[Packet]:
        return [packet for packet in attacker.steps if packet.topic == TOPICS.down(VICTIM, "sum")]

    eventually(
        lambda: len(of_victim()) >= 5
    )  # the last one reaches the attacker when it may: the sum is over
    again = of_victim()
    assert [decode(packet.payload, SumStep).stage for packet in again][:5] == [
        "open",
        "peers",
        "shares",
        "survivors",
        "signatures",
    ]
    fleet.restart(VICTIM)
    attacker.replies.clear()
    for packet in again:
        attacker.publish(packet)
    attacker.exchange(attacker.sum("c", release, NAMES), {VICTIM: SumStep("c", "open")})
    id = decode(again[0].payload, SumStep).id
    assert attacker.declined(id) == {VICTIM: "replayed"}
    assert not [reply for _, reply, _, _ in attacker.replies if isinstance(reply, bytes)]


@pytest.mark.broker
def test_a_release_that_asks_for_no_sums_gets_none_even_if_the_server_signs(fleet: Fleet) -> None:
    release = fleet.release()
    assert not fleet.vectors()
    with pytest.raises(
        SecureSumError, match=r"0 devices take part, expected 5 to 100 \(6 with nothing to add\)"
    ):
        fleet.sums.collect("statistics", release, LENGTH, QUICK)


@pytest.mark.broker
def test_a_restart_before_and_after_the_vector_leaves(fleet: Fleet) -> None:
    release = fleet.release(sums=["statistics"])
    attacker = Attacker(fleet, fleet.director)
    first = attacker.sum("a", release, NAMES)
    attacker.exchange(first, first.open())
    peers = first.advance()
    fleet.restart(VICTIM)  # given to the sum, and nothing has left
    attacker.exchange(first, peers)
    assert VICTIM in first.waiting and VICTIM in fleet.vectors()
    second = attacker.sum("b", release, NAMES)
    steps = second.open()
    for _ in ("keys", "shares", "vector"):
        attacker.exchange(second, steps)
        steps = second.advance()
    assert second._added == set(NAMES) and not fleet.vectors()
    fleet.restart(VICTIM)  # after its vector has left, and before it signs
    third = attacker.sum("c", release, NAMES)
    attacker.exchange(third, third.open())
    assert attacker.declined("c") == dict.fromkeys(NAMES, "nothing")


@pytest.mark.broker
def test_a_device_whose_folder_is_restored_from_a_backup_sends_no_picture_twice(fleet: Fleet) -> None:
    release = fleet.release(sums=["statistics"])
    backup = fleet.home / "backup"
    shutil.copytree(fleet.home / VICTIM, backup)
    assert fleet.sums.collect("statistics", release, LENGTH, QUICK).devices == tuple(NAMES)
    fleet.devices[VICTIM].crash()
    eventually(lambda: VICTIM not in fleet.server.roster.head_devices())
    shutil.rmtree(fleet.home / VICTIM)
    shutil.copytree(backup, fleet.home / VICTIM)
    fleet.start([VICTIM])
    eventually(lambda: fleet.settled(VICTIM))
    assert VICTIM in fleet.vectors()  # it would offer the same again
    with pytest.raises(SecureSumError, match=r"0 devices take part.*\(5 with nothing to add, 1 restored\)"):
        fleet.sums.collect("statistics", release, LENGTH, QUICK)
    assert not fleet.vectors()
    assert "restored from a backup" in Store(fleet.home / VICTIM).sums().declined
    with pytest.raises(SecureSumError, match=r"\(6 with nothing to add\)"):
        fleet.sums.collect("statistics", release, LENGTH, QUICK)


@pytest.mark.broker
@pytest.mark.parametrize("terms", [{"minimum": 3}, {"threshold": 0.501}])
def test_terms_below_a_devices_floors_get_no_vector(fleet: Fleet, terms: Any) -> None:
    assert DEFAULT.minimum > 3 and DEFAULT.threshold > 0.501
    release = fleet.release(sums=["statistics"])
    with pytest.raises(SecureSumError, match=r"0 devices take part.*\(6 below_floor\)"):
        fleet.sums.collect("statistics", release, LENGTH, SumOptions(stage_s=20.0, **terms))
    assert fleet.vectors().keys() == set(NAMES)
    assert next(iter(terms)) in Store(fleet.home / VICTIM).sums().declined
