"""Identities on a broker with access control: revoked and duplicate devices do not count; one server per fleet."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from edge_fl.errors import ConfigError, ConnectError
from edge_fl.wire import identity
from edge_fl.wire.messages import DeviceState, Report, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Disconnected, Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import connector, denied, read_retained
from edge_fl_server.mqtt.devices import device_list
from edge_fl_server.mqtt.devices.roster import DuplicateDetector, Roster
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.updates.inbox import Inbox
from edge_fl_server.registry import Database, registered_devices
from tests.server.conftest import QUICK
from tests.server.scripted import ScriptedDevice


@pytest.mark.parametrize(
    ("boots", "found"),
    [
        ("aaaa", False),
        ("abcd", False),  # a device that restarts again and again
        ("aba", False),  # a late message of the ended process
        ("abab", True),
        ("abcbcb", True),
    ],
)
def test_alternating_boot_ids_are_two_machines(boots: str, found: bool) -> None:
    detector = DuplicateDetector()
    assert any(detector.add("pi-1", boot) for boot in boots) is found
    assert detector.add("pi-2", "a") is None


@dataclass
class Site:
    """A broker with access control that does not reload its access list or revocations, such as a foreign or slow one."""

    authority: Authority
    port: int
    folder: Path
    connection: ServerConnection
    roster: Roster
    inbox: Inbox
    devices: list[ScriptedDevice]

    def device(self, name: str, boot: str = "b1") -> ScriptedDevice:
        """A device with its own certificate, or with a copy of it."""
        if not (folder := self.folder / name).exists():
            self.authority.bake({name: folder})
        endpoint = identity.read(folder).endpoint("127.0.0.1", self.port)
        self.devices.append(
            ScriptedDevice(partial(MqttTransport, endpoint), self.connection.topics, name, boot=boot)
        )
        return self.devices[-1]


def eventually(so: Callable[[], object], wait_s: float = 60.0) -> bool:
    until = time.monotonic() + wait_s
    while not (found := so()) and time.monotonic() < until:
        time.sleep(0.05)
    return bool(found)


@pytest.fixture
def site(mosquitto_program: Program, tmp_path: Path) -> Iterator[Site]:
    authority = Authority.make(tmp_path / "home")
    settings = BrokerSettings(
        tmp_path / "mosquitto", port=0, certificates=register_sync.certificates(authority, "127.0.0.1")
    )
    server = authority.home / "server"
    with (
        Mosquitto(register_sync.with_register(settings, authority), mosquitto_program) as broker,
        Journal(denied=denied(server)) as journal,
    ):
        port = broker.settings.port
        connection = ServerConnection(connector("127.0.0.1", port, server), journal, limits=QUICK)
        site = Site(authority, port, tmp_path, connection, Roster(connection), Inbox(connection), [])
        connection.open()
        yield site
        connection.close()
        for device in site.devices:
            device.close()


@pytest.mark.broker
def test_two_machines_with_one_certificate_are_quarantined(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    genuine = site.device("pi-1")
    assert eventually(lambda: site.roster.full_devices() == ["pi-1"])
    site.device("pi-2", "original"), site.device("pi-2", "copy")
    assert eventually(lambda: site.inbox.journal.blocked("pi-2"))
    assert site.roster.full_devices() == ["pi-1"]
    (alert,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "pi-2: quarantined" in alert.message and "two machines" in alert.message
    assert not genuine.failures


@pytest.mark.broker
def test_messages_of_a_revoked_device_in_an_open_session_do_not_count(site: Site) -> None:
    thief = site.device("pi-3")
    assert eventually(lambda: site.roster.full_devices() == ["pi-3"])
    site.authority.revoke("pi-3")
    assert eventually(lambda: not site.roster.full_devices())
    journal = site.inbox.journal
    assert [(found.device, found.blocked) for found in registered_devices.listed(journal.db, "main")] == [
        ("pi-3", "revoked")
    ]
    operator = connector("127.0.0.1", site.port, site.authority.home / "operator")
    (row,) = device_list.devices(operator, "main", journal.db).rows
    assert (row["device"], row["standing"]) == ("pi-3", "revoked") and "fleet enrol pi-3" in row["reason"]
    thief.report("t1", 1, Report("r1", "update", "b1", 20), b"")
    assert eventually(lambda: thief.acks)
    assert [(ack.status, ack.reason) for ack in thief.acks] == [("rejected", "revoked")]
    site.authority.bake({"pi-3": site.folder / "again"})
    site.authority.publish()
    assert eventually(lambda: site.roster.full_devices() == ["pi-3"]), (
        "a name that is enrolled again is heard again"
    )
    assert not registered_devices.get(journal.db, "main", "pi-3").revoked


@pytest.mark.broker
def test_a_second_server_finds_the_first_one_without_disconnecting_it(site: Site) -> None:
    second = connector("127.0.0.1", site.port, site.authority.home / "server")
    with pytest.raises(ConnectError, match="another server"):
        ServerConnection(second, Journal(), limits=QUICK).open()
    site.device("pi-4")
    assert eventually(lambda: site.roster.full_devices() == ["pi-4"])
    site.connection.check()


@pytest.mark.broker
def test_an_operator_lists_devices_while_a_server_runs(site: Site) -> None:
    site.device("pi-5")
    operator = connector("127.0.0.1", site.port, site.authority.home / "operator")
    assert eventually(
        lambda: (
            [row["device"] for row in device_list.devices(operator, "main", Database.open()).rows] == ["pi-5"]
        )
    )
    site.connection.check()


@pytest.mark.broker
def test_messages_on_a_device_topic_count_for_device_names_only(site: Site) -> None:
    will = Packet(site.connection.topics.up("operator", "state"), b"")
    operator = connector("127.0.0.1", site.port, site.authority.home / "operator")(
        "operator", will, lambda event: None
    )
    operator.wait_connected(60)
    operator.publish(
        Packet(site.connection.topics.up("operator", "state"), encode(DeviceState("ready", "b1")))
    )
    assert eventually(lambda: site.connection.malformed)
    assert "operator" not in site.roster.table
    operator.close()


@pytest.mark.broker
def test_a_devices_identity_cannot_be_used_for_reading(site: Site, tmp_path) -> None:
    site.authority.bake({"pi-1": tmp_path / "pi-1"})
    with pytest.raises(ConfigError, match=r"the identity of 'pi-1' \(device\), expected that of the server"):
        connector("127.0.0.1", site.port, tmp_path / "pi-1")


@pytest.mark.broker
def test_a_reader_with_the_operators_identity_does_not_disconnect_the_operator(site: Site) -> None:
    lost = threading.Event()
    connect = connector("127.0.0.1", site.port, site.authority.home / "operator")
    will = Packet(site.connection.topics.up("operator", "state"), b"")
    at_work = connect("operator", will, lambda event: isinstance(event, Disconnected) and lost.set())
    at_work.wait_connected(60)
    assert read_retained(connect, [site.connection.topics.server("state")])
    at_work.publish(Packet(site.connection.topics.server("state"), b""))
    at_work.drain(60)
    assert not lost.is_set() and not at_work.denied
    at_work.close()
