"""Who may do what, asked of a real mosquitto over mTLS: every role, every topic, to publish and to read; and who gets in at all.

mosquitto grants a subscription that it will not serve, so reading is tried by delivery: a message counts as read when it arrives.
One file, longer than others, because all its tests share one broker with its authority.
"""

import contextlib
import queue
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from paho.mqtt.client import topic_matches_sub

from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.wire import identity, topics
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.roles import PERSON_ROLES
from edge_fl.wire.topics import Topics, access_rules, home_assistant, role_of
from edge_fl.wire.transport import Disconnected, Event, Packet
from edge_fl_broker.checks import BrokerCheck, full_check
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import RELOADS, Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_broker.provision.register_sync import RegisterSync
from tests.edge_fl.wire.brokers import held_port, refused

pytestmark = pytest.mark.broker
FLEET = Topics("mill")
WAIT_S = 60.0  # on a busy machine; every wait ends with its event
LATER = timedelta(hours=2)
SHA = "0" * 64
RELOADING = "Reloading config"


def topics_of(device: str) -> dict[str, str]:
    """Every family of topics, those of one device and its claim among them."""
    return {
        "srv/state": FLEET.server("state"),
        "srv/beat": FLEET.server("beat"),
        "tuf": FLEET.tuf("timestamp.json"),
        "art": FLEET.chunk(SHA, 0),
        "round": FLEET.round("run_id"),
        "dn/assignment": FLEET.down(device, "assignment"),
        "dn/agent": FLEET.down(device, "agent"),
        "dn/settings": FLEET.down(device, "settings"),
        "dn/cmd": FLEET.down(device, "cmd"),
        "dn/ack": FLEET.down(device, "ack"),
        "dn/echo": FLEET.down(device, "echo"),
        "up/state": FLEET.up(device, "state"),
        "up/meta": FLEET.up(device, "meta"),
        "up/rpt": FLEET.up(device, "rpt", "run_id", 1),
        "up/blob": FLEET.up(device, "blob", "id", 0),
        "up/req": FLEET.up(device, "req"),
        "up/log": FLEET.up(device, "log"),
        "dn/sum": FLEET.down(device, "sum"),
        "up/sum": FLEET.up(device, "sum"),
        "up/sum chunk": FLEET.up(device, "sum", "id", 0),
        "dn/query": FLEET.down(device, "query"),
        "up/query": FLEET.up(device, "query"),
        "up/query chunk": FLEET.up(device, "query", "id", 0),
        "enroll/req": FLEET.enrol(device, "req"),
        "enroll/rsp": FLEET.enrol(device, "rsp"),
    }


BROADCAST = {"srv/state", "srv/beat", "tuf", "art", "round"}
DOWN = {name for name in topics_of("x") if name.startswith("dn/")}
# what a device says, if to itself
UP = {name for name in topics_of("x") if name.startswith("up/")} | {"dn/echo"}
ALL = set(topics_of("x"))
STATES = {"srv/state", "srv/beat", "tuf", "dn/assignment", "up/state", "up/meta", "up/log"}
# role -> what it may (write, read) of its own and of another's topics, written out by hand: the rules are not to grade themselves
MAY: dict[str, tuple[set[str], set[str], set[str], set[str]]] = {
    "server": (ALL, ALL, ALL, ALL),
    "worker": (
        {"enroll/req", "dn/ack"} | UP,
        BROADCAST | DOWN | {"enroll/rsp", "up/rpt", "up/blob"},
        {"dn/ack"},
        BROADCAST | {"up/rpt", "up/blob"},
    ),
    "reader": ({"enroll/req"} | UP, ALL, set(), ALL),
    "admin": (
        {"srv/state", "srv/beat", "tuf", "art", "enroll/req"} | DOWN | UP,
        ALL,
        {"srv/state", "srv/beat", "tuf", "art"} | DOWN,
        ALL,
    ),
    "viewer": (set(), {"srv/state", "srv/beat", "tuf"}, set(), STATES),
    "operator": (
        set(),
        {"srv/state", "srv/beat", "tuf"},
        {"dn/cmd", "dn/query"},
        STATES | {"up/query", "up/query chunk"},
    ),
    "releaser": (
        {"srv/state", "srv/beat", "tuf", "art"},
        BROADCAST,
        {"srv/state", "srv/beat", "tuf", "art"} | DOWN,
        ALL - {"enroll/req", "enroll/rsp"},
    ),
    "registrar": (
        {"enroll/req", "enroll/rsp"} | UP,
        BROADCAST | DOWN | {"enroll/req", "enroll/rsp"},
        {"enroll/req", "enroll/rsp"},
        BROADCAST | {"enroll/req", "enroll/rsp"},
    ),
    "device": (UP | {"enroll/req"}, BROADCAST | DOWN | {"enroll/rsp"}, set(), BROADCAST),
    "claim": ({"enroll/req"}, {"enroll/rsp"}, set(), set()),
}


class Ear:
    """A client that records received packets; `lost` is set when the broker disconnects it."""

    def __init__(
        self,
        endpoint: Endpoint,
        name: str = "another name",
        session_expiry_s: int = 0,
    ) -> None:
        self.heard: queue.SimpleQueue[Packet] = queue.SimpleQueue()
        self.lost = threading.Event()
        self.transport = MqttTransport(endpoint, name, None, self._keep, session_expiry_s=session_expiry_s)
        try:
            self.transport.wait_connected(WAIT_S)
        except ConnectError:
            self.transport.close()
            raise

    def _keep(self, event: Event) -> None:
        if isinstance(event, Packet):
            self.heard.put(event)
        elif isinstance(event, Disconnected):
            self.lost.set()

    def until(self, last: bytes) -> set[bytes]:
        """What was heard before the packet that ends it."""
        found = set()
        while (packet := self.heard.get(timeout=WAIT_S)).payload != last:
            found.add(packet.payload)
        return found


@dataclass
class Site:
    """A broker that is closed, its CA, and clients by name."""

    broker: Mosquitto
    authority: Authority
    sync: RegisterSync
    folder: Path

    def at(self, name: str) -> Endpoint:
        folder = self.folder / name
        if not folder.exists():
            offices = {"server": "server", "reader": "server/reader"}
            office = self.authority.home / offices.get(name, name)
            if not office.exists():
                self.authority.bake({name: folder})
            else:
                shutil.copytree(office, folder)
        return identity.read(folder).endpoint("127.0.0.1", self.broker.settings.port)

    def enter(self, name: str) -> Ear:
        return Ear(self.at(name))

    def refuses(self, endpoint: Endpoint, says: str = "") -> None:
        client = MqttTransport(endpoint, "another name", None, lambda event: None, session_expiry_s=0)
        refused(client, f"(?i){says}")
        client.close()


def test_the_table_has_every_kind_of_topic_of_a_device() -> None:
    assert {name.removeprefix("dn/") for name in DOWN} == set(topics.DOWN)
    assert {name.split()[0].removeprefix("up/") for name in UP - DOWN} == set(topics.UP)


@pytest.fixture(scope="module")
def site(mosquitto_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("access")
    authority = Authority.make(folder / "home")
    (folder / "ids").mkdir()
    claims = authority.claim({f"pi-{number}": folder / f"claim-{number}" for number in (8, 9)})
    for number, claim in enumerate(claims):
        claim.folder.rename(folder / "ids" / f"claim{number}")
    authority.bake({f"pi-{number}": folder / "ids" / f"pi-{number}" for number in (1, 2)})
    authority.bake({"worker-1": folder / "ids" / "worker-1"})
    for role in PERSON_ROLES:
        authority.enrol_people(role, ["ann"], folder / "ids")
    (folder / "ids" / "releaser-ann" / "reader").rename(folder / "ids" / "second")
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = register_sync.with_register(
        BrokerSettings(folder / "broker", port=0, fleet="mill", certificates=certificates), authority
    )
    with Mosquitto(settings, mosquitto_program) as broker:
        yield Site(broker, authority, RegisterSync(broker, authority), folder / "ids")


def name_of(site: Site, who: str) -> str:
    return identity.read(site.folder / who).name if (site.folder / who).exists() else who


CASES = [
    ("server", "pi-1"),
    ("worker-1", "pi-1"),
    ("reader", "pi-1"),
    ("operator", "pi-1"),
    ("registrar", "pi-1"),
    ("viewer-ann", "pi-1"),
    ("operator-ann", "pi-1"),
    ("releaser-ann", "pi-1"),
    ("second", "pi-1"),
    ("pi-1", "pi-2"),
    ("claim0", "claim1"),
]


@pytest.mark.parametrize(("who", "other"), CASES, ids=[who for who, _ in CASES])
def test_a_role_writes_and_reads_what_it_should_and_nothing_else(site: Site, who: str, other: str) -> None:
    site.at(who)
    me, them = name_of(site, who), name_of(site, other)
    own, others = topics_of(me), topics_of(them)
    everything = [*own.items(), *((name, topic) for name, topic in others.items() if name not in BROADCAST)]
    witness = site.enter("server") if who != "server" else Ear(site.at("server"))
    subject = witness if who == "server" else site.enter(who)
    witness.transport.subscribe(f"{FLEET.root}/#")
    witness.transport.drain(WAIT_S)

    for _, topic in everything:
        subject.transport.publish(Packet(topic, f"w {topic}".encode()))
    subject.transport.drain(WAIT_S)
    witness.transport.publish(Packet(FLEET.up("last", "log"), b"last"))
    written = {payload[2:].decode() for payload in witness.until(b"last") if payload.startswith(b"w ")}

    for topic in (
        *(topic for _, topic in everything),
        f"{FLEET.root}/#",
        "#",
        FLEET.up("+", "#"),
        FLEET.down("+", "#"),
    ):
        subject.transport.subscribe(topic)  # granted, whatever they are
    people = dict.fromkeys(PERSON_ROLES, FLEET.server("state"))
    own_rsp = {"claim": own["enroll/rsp"], "device": FLEET.down(me, "assignment"), **people}.get(
        role_of(me), FLEET.enrol(me, "rsp")
    )
    subject.transport.drain(WAIT_S)
    ready = secrets.token_bytes(4)
    witness.transport.publish(Packet(own_rsp, ready, retain=True))  # subscriptions stand once this has come
    subject.until(ready)
    witness.transport.publish(Packet(own_rsp, b"", retain=True))
    for _, topic in everything:
        witness.transport.publish(Packet(topic, f"r {topic}".encode()))
    witness.transport.publish(Packet(own_rsp, b"end"))
    read = {payload[2:].decode() for payload in subject.until(b"end") if payload.startswith(b"r ")}

    write_own, read_own, write_other, read_other = MAY[role_of(me)]
    may_write = {own[name] for name in write_own} | {others[name] for name in write_other}
    may_read = {own[name] for name in read_own} | {others[name] for name in read_other}
    assert written == may_write
    assert read == may_read
    for ear in {id(witness): witness, id(subject): subject}.values():
        ear.transport.close()


def test_a_device_publishes_predictions_for_home_assistant_under_its_own_name_alone(site: Site) -> None:
    """The operator, as whom Home Assistant signs in, reads them; devices and claims do not."""
    operator, device, claim = (site.enter(who) for who in ("operator", "pi-1", "claim0"))
    me = name_of(site, "claim0")
    for ear in (operator, device, claim):
        ear.transport.subscribe("homeassistant/#")
        ear.transport.drain(WAIT_S)
    claim.transport.publish(Packet(home_assistant(me, "class/config"), b"of a claim"))
    claim.transport.publish(Packet(home_assistant(me, "agent/state", "update"), b"of a claim"))
    claim.transport.drain(WAIT_S)
    for topic in (
        home_assistant("pi-2", "prediction"),
        home_assistant("pi-2", "release/state", "update"),
        "homeassistant/switch/pi-1/config",
        "homeassistant/status",
        "homeassistant/sensor/prediction",
    ):
        device.transport.publish(Packet(topic, b"not its own"))
    device.transport.publish(Packet(home_assistant("pi-1", "release/state", "update"), b"release/state"))
    for leaf in ("class/config", "prediction", "availability"):
        device.transport.publish(Packet(home_assistant("pi-1", leaf), leaf.encode()))
    device.transport.drain(WAIT_S)
    assert operator.until(b"availability") == {b"release/state", b"class/config", b"prediction"}
    assert device.heard.empty() and claim.heard.empty()
    for ear in (operator, device, claim):
        ear.transport.close()


def test_the_rights_of_a_person_end_with_the_certificate_also_in_an_open_session(
    site: Site, tmp_path: Path
) -> None:
    later = Authority(
        site.authority.home, site.authority._ca, site.authority._key, lambda: datetime.now(UTC) + LATER
    )
    (short,) = site.authority.enrol_people("operator", ["bo"], tmp_path, LATER / 2)
    with reloading(site.broker):
        assert site.sync.update(), "the access list names people"
    sync = RegisterSync(site.broker, site.authority)
    person, device = Ear(short.endpoint("127.0.0.1", site.broker.settings.port)), site.enter("pi-1")
    device.transport.subscribe(FLEET.down("pi-1", "#"))
    device.transport.drain(WAIT_S)
    person.transport.publish(Packet(FLEET.down("pi-1", "cmd"), b"in time"))
    assert device.until(b"in time") == set()

    sync._authority = later
    with reloading(site.broker):
        assert sync.update(), "a certificate has expired"
        assert not sync.update(), "once is enough"
    server = site.enter("server")
    for ear in (person, device):
        ear.transport.wait_connected(WAIT_S)
    device.transport.subscribe(FLEET.down("pi-1", "#"))
    device.transport.drain(WAIT_S)
    person.transport.publish(Packet(FLEET.down("pi-1", "cmd"), b"too late"))
    with contextlib.suppress(DeadlineError):
        person.transport.drain(1.0)
    server.transport.publish(Packet(FLEET.down("pi-1", "cmd"), b"last"))
    assert device.until(b"last") == set()
    server.transport.close()
    for ear in (person, device):
        ear.transport.close()


def test_the_rules_hold_for_names_that_the_register_never_saw() -> None:
    """The five families of a device are patterns: one more device needs no other access list."""
    patterns = [topic.replace("%u", "pi-77") for role, _, topic in access_rules("mill") if role == "device"]
    assert any(topic_matches_sub(pattern, FLEET.up("pi-77", "state")) for pattern in patterns)
    assert not any(topic_matches_sub(pattern, FLEET.up("pi-78", "state")) for pattern in patterns)


def test_a_stolen_client_id_is_worth_nothing(site: Site) -> None:
    victim, thief = site.enter("pi-1"), Ear(site.at("pi-2"), "pi-1")
    server = site.enter("server")
    thief.transport.subscribe(FLEET.down("pi-1", "#"))
    thief.transport.subscribe(FLEET.down("pi-2", "#"))
    server.transport.subscribe(FLEET.up("+", "#"))
    server.transport.drain(WAIT_S)
    thief.transport.publish(Packet(FLEET.up("pi-1", "state"), b"spoofed"))
    thief.transport.publish(Packet(FLEET.up("pi-2", "log"), b"own"))
    assert server.until(b"own") == set()
    server.transport.publish(Packet(FLEET.down("pi-1", "assignment"), b"for the victim"))
    server.transport.publish(Packet(FLEET.down("pi-2", "assignment"), b"for the thief"))
    assert thief.until(b"for the thief") == set()
    assert not victim.lost.is_set(), "the broker calls the thief by the name on its certificate"
    for ear in (victim, thief, server):
        ear.transport.close()


def test_clients_without_a_valid_certificate_are_rejected(site: Site, tmp_path: Path) -> None:
    good = site.at("pi-1")
    strangers = Authority.make(tmp_path / "strangers")
    stranger = strangers.bake({"pi-1": tmp_path / "pi-1"})[0].endpoint(good.host, good.port)
    old = Authority(
        site.authority.home,
        site.authority._ca,
        site.authority._key,
        lambda: datetime.now(UTC) - timedelta(days=30),
    )
    expired = old.bake({"pi-old": tmp_path / "pi-old"}, timedelta(days=20))[0].endpoint(good.host, good.port)
    broker = Endpoint(
        good.host,
        good.port,
        good.ca,
        *(site.authority.home / "broker" / name for name in ("client.crt", "client.key")),
    )
    site.refuses(replace(stranger, ca=good.ca))  # the broker does not know its CA
    site.refuses(stranger, "certificate verify failed")  # nor does it know the broker's
    site.refuses(expired)
    site.refuses(broker)  # a certificate for serving is none for connecting
    site.refuses(replace(good, cert=None, key=None))
    site.refuses(Endpoint(good.host, good.port))  # plaintext
    Ear(good).transport.close()


def test_a_broker_for_this_fleet_has_no_plaintext_door(site: Site) -> None:
    text = site.broker.settings.config_path.read_text()
    assert [line for line in text.splitlines() if line.startswith("listener")] == [
        f"listener {site.broker.settings.port} 127.0.0.1"
    ]


def test_a_revoked_device_is_silent_at_once_and_never_comes_back(site: Site) -> None:
    thief, other, server = site.enter("pi-5"), site.enter("pi-1"), site.enter("server")
    server.transport.subscribe(FLEET.up("+", "#"))
    server.transport.drain(WAIT_S)
    thief.transport.subscribe(FLEET.down("pi-5", "#"))
    thief.transport.publish(Packet(FLEET.up("pi-5", "log"), b"before"))
    assert server.until(b"before") == set()

    site.authority.revoke("pi-5")
    with reloading(site.broker):
        assert site.sync.update(), "the register has changed"
        assert not site.sync.update(), "once is enough"
    if site.broker.program.version >= RELOADS:
        assert not other.lost.is_set() and not server.lost.is_set(), "nobody else notices"
    for ear in (other, server):
        ear.transport.wait_connected(WAIT_S)
    server.transport.subscribe(FLEET.up("+", "#"))
    server.transport.drain(WAIT_S)
    thief.transport.publish(Packet(FLEET.up("pi-5", "log"), b"from the live session"))
    with contextlib.suppress(DeadlineError):
        thief.transport.drain(1.0)
    other.transport.publish(Packet(FLEET.up("pi-1", "log"), b"last"))
    assert server.until(b"last") == set()
    server.transport.publish(Packet(FLEET.down("pi-5", "assignment"), b"not for you"))
    server.transport.drain(WAIT_S)
    assert thief.heard.empty()
    for ear in (thief, other, server):
        ear.transport.close()
    site.refuses(site.at("pi-5"))
    Ear(site.at("pi-1")).transport.close()


def test_a_client_offline_during_a_register_change_reconnects_and_stays_connected(
    site: Site, tmp_path: Path
) -> None:
    names = [f"away-{number}" for number in range(8)]
    places = {name: site.at(name) for name in names}
    for endpoint in places.values():
        Ear(endpoint, session_expiry_s=600).transport.close()
    before = site.broker.pid
    site.authority.claim({"pi-10": tmp_path / "claim"})
    with reloading(site.broker):
        assert site.sync.update(), "the access list names claims"
    assert (site.broker.pid == before) is (site.broker.program.version >= (2, 1, 0)), (
        "older ones do not survive SIGHUP"
    )
    for _ in range(3):
        ears = [Ear(endpoint, session_expiry_s=600) for endpoint in places.values()]
        time.sleep(2.0)  # mosquitto looks once a second whose session is over
        assert not any(ear.lost.is_set() for ear in ears)
        for ear in ears:
            ear.transport.close()
    assert not site.broker.has_ended()


def test_a_certificate_that_a_device_gets_is_no_reason_to_read_anything_again(site: Site) -> None:
    site.sync.update()
    site.at("pi-11")
    site.authority.publish()  # as after every certificate: the same revocations, signed anew
    assert not site.sync.update()


def needs(findings: list[BrokerCheck]) -> dict[str, str]:
    """What was found where something else is needed; how quick a shared machine is aside."""
    return {
        finding.what: finding.found for finding in findings if not finding.ok and finding.what != "round trip"
    }


def test_a_trial_approves_of_our_broker_and_names_what_is_wrong_with_another(
    site: Site, mosquitto_program: Program, tmp_path: Path
) -> None:
    endpoint = Endpoint("127.0.0.1", site.broker.settings.port)
    assert needs(full_check(site.authority.home, endpoint, "mill", 10.0)) == {}

    config = tmp_path / "mosquitto.conf"
    text = site.broker.settings.config_path.read_text()
    text = text.replace(str(site.broker.settings.folder), str(tmp_path)).replace("acl_file", "# acl_file")
    command = [str(mosquitto_program.path), "-c", str(config)]
    with held_port() as port:
        config.write_text(text.replace(str(endpoint.port), str(port)))
        with subprocess.Popen(
            command, stderr=subprocess.DEVNULL, env={**mosquitto_program.environment}
        ) as open_door:
            try:
                found = needs(full_check(site.authority.home, Endpoint("127.0.0.1", port), "mill", 10.0))
            finally:
                open_door.terminate()
    assert set(found) == {"device publishes on", "device receives"}
    assert "another's dn" in found["device publishes on"] and "another's up" in found["device receives"]


@contextlib.contextmanager
def reloading(broker: Mosquitto) -> Iterator[None]:
    """Wait until mosquitto says that it has read its configuration once more than before; one that was started again has."""
    before = broker.log_path.read_text().count(RELOADING)
    yield
    until = time.monotonic() + WAIT_S
    while broker.program.version >= RELOADS and broker.log_path.read_text().count(RELOADING) == before:
        assert time.monotonic() < until
        time.sleep(0.02)
