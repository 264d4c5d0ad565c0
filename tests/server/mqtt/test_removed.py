"""Devices that were decommissioned or renamed: certificate, assignments and retained messages end, history stays."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.wire import identity
from edge_fl.wire.messages import DeviceState, Report, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import LeaseLimits, connector, denied, read_retained
from edge_fl_server.mqtt.devices import device_list
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.registry import Database, registered_devices, registered_reports, registered_tags, runs
from edge_fl_server.registry.tables import RequestRecord
from tests.server.scripted import ScriptedDevice

pytestmark = pytest.mark.timeout(900)
TOPICS = Topics("main")
QUICK = LeaseLimits(settle_s=0.3)


@dataclass
class Site:
    """A broker with certificates, a registry, and three devices' identities."""

    folder: Path
    authority: Authority
    port: int

    @property
    def database(self) -> Path:
        return self.folder / "registry.sqlite"

    @property
    def connect(self):  # type: ignore[no-untyped-def]
        return connector("127.0.0.1", self.port, self.authority.home / "server")

    def command(self, *words: str) -> int:
        places = ("--identities", str(self.authority.home), "--database", str(self.database))
        return main(["fleet", *words, *places])

    def device(self, name: str) -> ScriptedDevice:
        endpoint = identity.read(self.folder / "ids" / name).endpoint("127.0.0.1", self.port)
        return ScriptedDevice(partial(MqttTransport, endpoint), TOPICS, name)

    def retained(self, name: str) -> set[str]:
        """The topics of a device with a retained message; the server's own, subscribed last, shows that all have come."""
        topics, last = (
            [TOPICS.up(name, "state"), TOPICS.up(name, "meta"), TOPICS.down(name, "assignment")],
            TOPICS.server("state"),
        )
        while last not in (found := set(read_retained(self.connect, [*topics, last], QUICK))):
            pass
        return found - {last}


@pytest.fixture
def site(mosquitto_program: Program, tmp_path: Path) -> Iterator[Site]:
    authority = Authority.make(tmp_path / "home")
    authority.bake({name: tmp_path / "ids" / name for name in ("pi-1", "pi-2")})
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = BrokerSettings(tmp_path / "mosquitto", port=0, certificates=certificates)
    with Mosquitto(register_sync.with_register(settings, authority), mosquitto_program) as broker:
        yield Site(tmp_path, authority, broker.settings.port)


def eventually(so: Callable[[], object], wait_s: float = 90.0) -> bool:
    until = time.monotonic() + wait_s
    while not (found := so()) and time.monotonic() < until:
        time.sleep(0.05)
    return bool(found)


def with_history(db: Database, server: Server, name: str) -> None:
    """A report, an open request, a tag and a retained assignment."""
    report = Report("r1", "head", "b1", 10)
    registered_reports.accept(db, registered_reports.record_of("main", name, "toy", 1, report))
    runs.add_requests(db, [RequestRecord("main", name, "r2", "toy", 2, "serve")])
    registered_tags.change(db, "main", [name], {"room": "kitchen"})
    server.assignments.assign(name, "serve", run_id="toy", id="r2", release=1)


@pytest.mark.broker
def test_a_decommissioned_device_leaves_the_fleet_and_its_history_stays(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    db = Database.open(site.database)
    with (
        Journal(db, denied=denied(site.authority.home / "server")) as journal,
        connected(ServerConnection(site.connect, journal)) as server,
    ):
        device, other = site.device("pi-1"), site.device("pi-2")
        server.roster.wait_for(full=2, deadline_s=90)
        with_history(db, server, "pi-1")
        assert eventually(
            lambda: len(site.retained("pi-1")) == 3 and registered_devices.get(db, "main", "pi-1")
        )
        assert site.command("decommission", "pi-1") == 4  # no terminal to ask on
        assert "expected --yes" in capsys.readouterr().err and server.roster.get("pi-1")
        assert site.command("decommission", "pi-1", "--yes") == 0
        assert "pi-1: decommissioned; its history stays" in capsys.readouterr().err
        assert eventually(lambda: server.roster.get("pi-1") is None)
        assert eventually(lambda: not site.retained("pi-1"))
        state = encode(DeviceState("ready", "b1", 9))
        device.send(TOPICS.up("pi-1", "state"), state, retain=True)  # its session is still open
        assert eventually(lambda: not site.retained("pi-1")) and server.roster.get("pi-1") is None
        assert (
            eventually(lambda: server.assignments.current("pi-1") is None)
            and journal.blocked("pi-1") == "removed"
        )
        assert server.roster.get("pi-2") and eventually(lambda: len(site.retained("pi-2")) == 2)
        device.close()
        other.close()
    assert {row.name for row in site.authority.register.rows() if row.revoked} == {"pi-1"}
    assert registered_reports.is_accepted(db, "main", "pi-1", "r1")

    def listed() -> list[object]:
        return [row["device"] for row in device_list.devices(site.connect, "main", db).rows]

    assert eventually(lambda: listed() == ["pi-2"])
    assert site.command("decommission", "pi-1", "--yes") == 0  # again, after an interruption
    assert "pi-1: decommissioned already" in capsys.readouterr().err
    assert main(["fleet", "admit", "pi-1", "--database", str(site.database)]) == 0
    assert registered_devices.get(db, "main", "pi-1").removed == ""  # type: ignore[union-attr]


@pytest.mark.slow  # three commands as child processes
@pytest.mark.broker
def test_a_renamed_device_keeps_its_history_and_gets_a_claim(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    db = Database.open(site.database)
    with Journal(db) as journal, connected(ServerConnection(site.connect, journal)) as server:
        device = site.device("pi-1")
        server.roster.wait_for(full=1, deadline_s=90)
        with_history(db, server, "pi-1")
        assert eventually(lambda: registered_devices.get(db, "main", "pi-1"))
        device.close()
    assert site.command("rename", "pi-1", "kitchen", "--yes") == 0  # no server is online
    said = capsys.readouterr()
    assert "pi-1: 1 revoked" in said.out and "replace its identity folder by" in said.err
    claim = identity.read(site.authority.home / "devices" / "kitchen")
    assert (claim.role, claim.device) == ("claim", "kitchen")
    assert registered_reports.is_accepted(db, "main", "kitchen", "r1") and not registered_reports.is_accepted(
        db, "main", "pi-1", "r1"
    )
    assert registered_tags.of_devices(db, "main") == {"kitchen": {"room": "kitchen"}}
    known = {row.device: row for row in registered_devices.listed(db, "main")}
    assert known["pi-1"].removed == "renamed to kitchen" and not known["kitchen"].blocked
    assert eventually(lambda: len(site.retained("pi-1")) == 3)
    with (
        Journal(db) as journal,
        connected(ServerConnection(site.connect, journal)),
    ):  # the next server clears them
        assert eventually(lambda: not site.retained("pi-1"))
    assert site.command("rename", "pi-1", "kitchen", "--yes") == 0  # again, after an interruption
    assert site.command("rename", "pi-1", "cellar", "--yes") == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("decommission", "pi-9", "--yes"), "no device 'pi-9'"),
        (("rename", "pi-1", "Kitchen!", "--yes"), "expected 1 to 32 of a-z"),
        (("rename", "pi-1", "server", "--yes"), "expected that of a device"),
        (("rename", "pi-1", "pi-2", "--yes"), "'pi-2' is or was a device already"),
        (("rename", "pi-1", "new"), "No terminal to ask on: expected --yes"),
    ],
)
def test_bad_input_changes_nothing(
    tmp_path: Path, words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    db = Database.open(tmp_path / "registry.sqlite")
    for name in ("pi-1", "pi-2"):
        registered_devices.readmit(db, "main", name)
    before = registered_devices.listed(db, "main")
    places = ("--identities", str(tmp_path / "none"), "--database", str(tmp_path / "registry.sqlite"))
    assert main(["fleet", *words, *places]) in (1, 4)
    assert expected in capsys.readouterr().err
    assert registered_devices.listed(db, "main") == before


def test_a_fleet_without_certificates_is_changed_in_the_registry_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = Database.open(tmp_path / "registry.sqlite")
    registered_devices.readmit(db, "main", "pi-1")
    places = ("--identities", str(tmp_path / "none"), "--database", str(tmp_path / "registry.sqlite"))
    assert main(["fleet", "rename", "pi-1", "kitchen", "--yes", *places]) == 0
    said = capsys.readouterr().err
    assert "no certificate was revoked" in said and "id = 'kitchen' in its settings" in said
    assert registered_devices.get(db, "main", "kitchen")
