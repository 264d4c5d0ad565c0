"""A broker that was restored from its last save is told from one that replays: both deliver what devices have replaced since."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from edge_fl.wire.messages import DeviceState, decode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings, MosquittoLimits
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision.authority import Authority
from edge_fl_server.mqtt import statements
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import fleet_authorities
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.registry import Database, registered_devices
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.director import Director
from tests.devices.scripted import eventually, running
from tests.failures.proxy import Proxy
from tests.mixed.attacked_broker import TOPICS, signing_device
from tests.rejections import rejections_of

COUNT = 20
ON_REQUEST = MosquittoLimits(autosave_changes=10**6)
NAMES = [f"pi-{number:02d}" for number in range(1, COUNT + 1)]


@dataclass
class Fleet:
    """A broker that saves on request alone, devices behind a link, and a server that signs; all on disk in `home`."""

    home: Path
    broker: Mosquitto
    link: Proxy
    stack: ExitStack

    def __post_init__(self) -> None:
        self.authority = Authority.make(self.home / "ca")
        self.authority.bake({name: self.home / "ca" / name for name in NAMES})
        self.repository = Repository(self.home / "releases")
        self.connect = partial(MqttTransport, self.broker.endpoint)

    def server(self) -> tuple[Server, Database]:
        """Start a server with the registry of the one before."""
        stack = self.stack.enter_context(ExitStack())
        db = stack.enter_context(closing(Database.open(self.home / "registry.sqlite")))
        journal = stack.enter_context(Journal(db, "main"))
        cas, director = fleet_authorities(self.home / "ca" / "server"), Director(self.repository, "main")
        return stack.enter_context(
            connected(
                ServerConnection(self.connect, journal, takeover=True, director=director, authorities=cas)
            )
        ), db


@pytest.fixture
def fleet(mosquitto_program: Program, tmp_path: Path) -> Iterator[Fleet]:
    with (
        Mosquitto(
            BrokerSettings(tmp_path / "mosquitto", port=0, limits=ON_REQUEST), mosquitto_program
        ) as broker,
        Proxy(broker.endpoint) as link,
        ExitStack() as stack,
    ):
        yield Fleet(tmp_path, broker, link, stack)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the server logged about messages that do not count."""
    return [each.getMessage() for each in caplog.records if each.name.endswith("statements")]


def test_a_fleet_behind_a_broker_that_was_killed_after_its_last_save_is_told_about_in_two_lines(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        statements, "GATHER_S", 3.0
    )  # on a busy machine the broker's messages take more than one
    connect = partial(MqttTransport, fleet.link.endpoint)
    server, db = fleet.server()
    agents = [signing_device(fleet.home, name) for name in NAMES]
    with running(*agents, connect=connect):
        server.roster.wait_for(heads=COUNT, deadline_s=60)
        for name in NAMES:
            server.assignments.assign(name, "rest")
        eventually(lambda: all(birth(db, name) for name in NAMES))  # the registry is written later
        saved = {name: birth(db, name) for name in NAMES}
        fleet.broker.save()
        eventually((fleet.broker.settings.folder / "mosquitto.db").exists)
        eventually(lambda: all(agent.state.assignment for agent in agents))
        for name in NAMES:  # lost with the broker, unlike the server's and the devices' memory of it
            server.connection.request_rebirth(name)
            server.assignments.assign(name, "rest")
        eventually(lambda: all(birth(db, name) > saved[name] for name in NAMES))
        fleet.link.drop_data()
        fleet.broker.kill()
        server.connection.end("killed")
        fleet.broker.restart()
        caplog.clear()
        server, db = fleet.server()
        eventually(lambda: lines(caplog))
        fleet.link.heal()
        server.roster.wait_for(heads=COUNT, deadline_s=60)
        eventually(lambda: any("nothing is lost" in line for line in lines(caplog)))
        assert {agent.state.why for agent in agents} == {""}
    found, replaced = lines(caplog)
    assert "the broker delivers older messages of" in found
    assert "the broker was restored, and nothing is lost" in replaced
    assert not rejections_of(db, "main")


def test_an_old_state_that_is_delivered_while_its_device_is_connected_is_replayed(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "SETTLE_S", 0.2)
    heard: list[Packet] = []
    server, db = fleet.server()
    with (
        running(*(signing_device(fleet.home, name) for name in NAMES[:3]), connect=fleet.connect),
        closing(
            fleet.connect("attacker", None, lambda e: heard.append(e) if isinstance(e, Packet) else None)
        ) as attacker,
    ):
        attacker.wait_connected(30)
        attacker.subscribe(TOPICS.up("pi-02", "state"))
        server.roster.wait_for(heads=3, deadline_s=60)
        eventually(lambda: heard)
        old = decode(heard[0].payload, DeviceState).signature
        assert old
        server.connection.request_rebirth("pi-02")
        eventually(lambda: record(db, "pi-02") > old.number)
        server.connection.close()
        attacker.publish(replace(heard[0], retain=True))
        attacker.drain(30)
        server, db = fleet.server()
        eventually(lambda: rejections_of(db, "main"))
        eventually(lambda: any("replayed messages of 1 device (pi-02)" in line for line in lines(caplog)))
        assert {(one.device, one.reason) for one in rejections_of(db, "main")} == {("pi-02", "replayed")}
        state = server.roster.get("pi-02")
        assert state and state.ready


def record(db: Database, device: str) -> int:
    """The number of the last signed state of a device in the registry."""
    found = registered_devices.get(db, "main", device)
    return found.signed_state if found else 0


def birth(db: Database, device: str) -> int:
    """The number of the last signed capability in the registry: a device sends one with each birth, and no other."""
    found = registered_devices.get(db, "main", device)
    return found.signed_meta if found else 0
