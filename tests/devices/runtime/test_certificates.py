"""A claim is exchanged once for a certificate on a key that stays on the device, and renewal loses no message."""

import queue
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.identity import Identity
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connected, Disconnected, Event, Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_broker.provision.register_sync import RegisterSync
from edge_fl_broker.provision.registrar import Registrar
from edge_fl_devices.runtime import certificates
from edge_fl_devices.runtime.certificates import CertificateExpiry, Renewal, enrol
from edge_fl_devices.runtime.connection import connector, own_connector

pytestmark = pytest.mark.broker
WAIT_S = 60.0  # on a busy machine; every wait ends with its event
FLEET = Topics("mill")


@dataclass
class Site:
    """A closed broker with its registrar."""

    broker: Mosquitto
    authority: Authority
    sync: RegisterSync
    ids: Path
    registrar: Registrar

    def claim(self, device: str) -> Identity:
        (found,) = self.authority.claim({device: self.ids / device})
        self.sync.update()
        return found

    def endpoint(self, found: Identity) -> Endpoint:
        return found.endpoint("127.0.0.1", self.broker.settings.port)

    def enrol(self, claim: Identity) -> Identity:
        endpoint = self.endpoint(claim)
        return enrol(claim, endpoint, "mill", connector(endpoint, "mill"), WAIT_S)


@pytest.fixture(scope="module")
def site(mosquitto_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("enrol")
    authority = Authority.make(folder / "home")
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = register_sync.with_register(
        BrokerSettings(folder / "broker", port=0, fleet="mill", certificates=certificates), authority
    )
    with Mosquitto(settings, mosquitto_program) as broker:
        registrar = Registrar(authority, "127.0.0.1", broker.settings.port, "mill")
        registrar.__enter__()
        found = Site(broker, authority, RegisterSync(broker, authority), folder / "ids", registrar)
        yield found
        found.registrar.__exit__(None, None, None)


def test_a_claim_becomes_a_certificate_and_is_gone(site: Site) -> None:
    claim = site.claim("pi-1")
    sent: queue.SimpleQueue[Packet] = queue.SimpleQueue()
    endpoint = site.endpoint(claim)

    class Watched(MqttTransport):
        def publish(self, packet: Packet) -> None:
            sent.put(packet)
            super().publish(packet)

    found = enrol(claim, endpoint, "mill", partial(Watched, endpoint), WAIT_S)
    assert (found.name, found.role, found.token) == ("pi-1", "device", None)
    assert {path.name for path in found.folder.iterdir()} == {"ca.crt", "client.crt", "client.key"}
    packet = sent.get_nowait()
    assert packet.topic == FLEET.enrol(claim.name, "req")
    assert b"CERTIFICATE REQUEST" in packet.payload and b"PRIVATE" not in packet.payload
    client = MqttTransport(site.endpoint(found), "pi-1", None, lambda event: None, session_expiry_s=0)
    client.wait_connected(WAIT_S)
    client.close()


def test_a_second_card_with_the_same_claim_gets_nothing(site: Site) -> None:
    claim = site.claim("pi-2")
    copy = shutil.copytree(claim.folder, site.ids / "copy")
    site.enrol(claim)
    with pytest.raises(ConnectError, match=r"pi-2: .* issues no certificate \(used\)"):
        site.enrol(identity.read(copy))
    assert identity.read(copy).role == "claim"


def test_a_lost_certificate_answer_is_requested_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = site.claim("pi-3")

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(identity, "replace", cut)
        site.enrol(claim)
    assert site.enrol(identity.read(claim.folder)).name == "pi-3"


def test_a_wrong_secret_is_rejected(site: Site) -> None:
    claim = site.claim("pi-4")
    assert claim.token
    guess = replace(claim, token=type(claim.token)("pi-4", "guess", claim.token.expires))
    with pytest.raises(ConnectError, match="wrong_token"):
        site.enrol(guess)


def test_a_request_waits_at_the_broker_while_the_registrar_reconnects(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device would repeat a lost request only after a long time."""
    authority, port = site.authority, site.broker.settings.port
    claim = site.claim("pi-8")
    endpoint = site.endpoint(claim)
    site.registrar.__exit__(None, None, None)
    requested: queue.SimpleQueue[MqttTransport] = queue.SimpleQueue()

    class Watched(MqttTransport):
        def publish(self, packet: Packet) -> None:
            super().publish(packet)
            requested.put(self)

    monkeypatch.setattr(certificates, "RESEND_S", 1000.0)
    with ThreadPoolExecutor(1) as pool:
        enrolling = pool.submit(enrol, claim, endpoint, "mill", partial(Watched, endpoint), WAIT_S)
        requested.get(timeout=WAIT_S).drain(WAIT_S)
        site.registrar = Registrar(authority, "127.0.0.1", port, "mill")
        site.registrar.__enter__()
        assert enrolling.result().name == "pi-8"


def test_without_a_registrar_enrolment_times_out(site: Site) -> None:
    claim = site.claim("pi-5")
    endpoint = site.endpoint(claim)
    with pytest.raises(DeadlineError, match="no answer to the claim"):
        enrol(claim, endpoint, "another", connector(endpoint, "another"), 1.0)  # a fleet that has none


def test_device_run_turns_a_claim_into_an_identity_first(site: Site) -> None:
    claim, said = site.claim("pi-6"), []
    connect, renewal = own_connector(
        "127.0.0.1", site.broker.settings.port, claim.folder, "mill", said.append
    )
    assert renewal.current.name == "pi-6"
    assert said and said[0].startswith("pi-6: enrolled")
    client = connect("pi-6", None, lambda event: None)
    client.wait_connected(WAIT_S)
    client.close()


def test_renewal_loses_no_message_and_the_new_certificate_is_used_afterwards(site: Site) -> None:
    """A certificate of ten seconds is renewed after two thirds of them while messages flow; then the broker restarts without it."""
    server_id = identity.read(site.authority.home / "server")
    server = MqttTransport(site.endpoint(server_id), "server", None, lambda event: None, session_expiry_s=0)
    server.wait_connected(WAIT_S)
    (old,) = site.authority.bake({"pi-7": site.ids / "pi-7"}, timedelta(seconds=10))
    endpoint = site.endpoint(old)
    heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
    renewal = Renewal(old, "mill")
    connect = renewal.through(partial(MqttTransport, endpoint))
    device = connect("pi-7", None, heard.put)
    device.wait_connected(WAIT_S)
    device.subscribe(FLEET.down("pi-7", "#"))
    device.drain(WAIT_S)
    sent, until = 0, time.monotonic() + WAIT_S
    while renewal.current.serial == old.serial and time.monotonic() < until:
        renewal.tick()
        server.publish(Packet(FLEET.down("pi-7", "assignment"), b"%d" % sent))
        sent += 1
        time.sleep(0.05)
    assert renewal.current.serial != old.serial
    server.publish(Packet(FLEET.down("pi-7", "assignment"), b"last"))
    events: list[Event] = []
    while not events or not (isinstance(events[-1], Packet) and events[-1].payload == b"last"):
        events.append(heard.get(timeout=WAIT_S))
    assert not [event for event in events if isinstance(event, Disconnected)]
    payloads = [event.payload for event in events if isinstance(event, Packet)]
    assert payloads == [*(b"%d" % number for number in range(sent)), b"last"]
    server.close()

    time.sleep(max(0.0, old.expires.timestamp() - time.time()) + 0.1)
    site.broker.stop()
    site.broker.start()
    while not isinstance(heard.get(timeout=WAIT_S), Connected):
        pass
    device.close()


def test_a_device_reports_when_its_current_certificate_ends(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "home")
    (found,) = authority.bake({"pi-7": tmp_path / "pi-7"}, timedelta(days=30))
    expiry = CertificateExpiry(found)
    assert expiry.end() == int(found.expires.timestamp())
    renewed = authority.rotate(found.folder)
    assert expiry.end() == int(renewed.expires.timestamp()) > int(found.expires.timestamp())
    assert CertificateExpiry(None).end() == 0
