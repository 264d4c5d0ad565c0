"""A server that signs, a real device, and a broker under an attacker's control between them.

This mosquitto has no access rules: every client may publish on all topics, as the broker itself could.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest

from edge_fl.release.agent import UpdateStatus
from edge_fl.wire.messages import Assignment, Capability, Log, decode, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install.fetch import FetchLimits
from edge_fl_devices.runtime.device import SIMULATED, Device, Services
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import fleet_authorities
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.registry import Database
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.director import Director
from tests.devices import graphs
from tests.devices.site import DATA
from tests.rejections import rejections_of

TOPICS = Topics("main")
QUICK = AgentLimits(settle_s=0.05, resend_s=0.5, retry_s=0.1, return_s=0.1)
FAST = FetchLimits(stall_s=0.3, bad_chunk_s=0.05, quiet_s=0.05, metadata_s=2.0)


def signing_device(home: Path, name: str, services: Services = SIMULATED) -> Device:
    """A head-only device with its folder and its identity (`ca/NAME`) in `home`."""
    folder = home / name
    worker = HeadWorker(
        name,
        Store(folder),
        FitSettings("nearest"),
        loader=LocalFeatureLoader(lambda classes, input: DATA, folder),
        fitter=fit_here,
        runtime=runtime,
        check=lambda installed: None,
        limits=QUICK,
    )
    can = Capability("head", "x86_64", "3.12", samples=20, agent="1.0", update=UpdateStatus(0))
    return Device(
        name, TOPICS, can, worker, limits=QUICK, fetching=FAST, identity=home / "ca" / name, services=services
    )


@dataclass
class Scene:
    """A server that signs, the broker, and an attacker's connection to it; `home` holds everything on disk."""

    home: Path
    broker: Mosquitto
    stack: ExitStack
    sent: list[Packet] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connect = partial(MqttTransport, self.broker.endpoint)
        authority = Authority.make(self.home / "ca")
        authority.bake({name: self.home / "ca" / name for name in ("pi-01", "pi-02")})
        self.repository = Repository(self.home / "releases")
        self.db = Database.open(self.home / "registry.sqlite")
        self.stack.callback(self.db.close)
        self.attacker = self.connect("attacker", None, self._record)
        self.stack.callback(self.attacker.close)
        self.attacker.wait_connected(30)
        self.attacker.subscribe(f"{TOPICS.root}/#")

    def _record(self, event: object) -> None:
        if isinstance(event, Packet) and event.payload:
            self.sent.append(event)

    def server(self, *, signs: bool = True) -> Server:
        """Start a server, with an earlier one's data."""
        journal = self.stack.enter_context(Journal(self.db, "main"))
        director = Director(self.repository, "main") if signs else None
        cas = fleet_authorities(self.home / "ca" / "server")
        return self.stack.enter_context(
            connected(
                ServerConnection(self.connect, journal, takeover=True, director=director, authorities=cas)
            )
        )

    def publish(self, server: Server) -> None:
        """Publish the next release."""
        payload = graphs.graph()
        manifest = graphs.manifest_for(payload, release=self.repository.next_release())
        assert server.connection.transport
        publisher = Publisher(server.connection.transport, TOPICS, self.repository)
        publisher.publish(manifest, {manifest.extractor.sha256: payload})

    def device(self, name: str = "pi-01", services: Services = SIMULATED) -> Device:
        return signing_device(self.home, name, services)

    def assignments(self, device: str = "pi-01") -> list[Assignment]:
        """Everything that was ever assigned to a device, as it went over the broker."""
        sent = [packet.payload for packet in self.sent if packet.topic == TOPICS.down(device, "assignment")]
        return [decode(payload, Assignment) for payload in sent]

    def inject(self, topic: str, message: msgspec.Struct, *, retain: bool = True) -> None:
        self.attacker.publish(Packet(topic, encode(message), retain=retain))

    def log_lines(self) -> list[str]:
        """The lines that devices logged, as they went over the broker."""
        return [decode(p.payload, Log).text for p in self.sent if p.topic == TOPICS.up("pi-01", "log")]

    def rejections(self) -> list[str]:
        return [row.reason for row in rejections_of(self.db, "main", device="pi-01")]


@pytest.fixture
def scene(mosquitto_program: Program, tmp_path: Path) -> Iterator[Scene]:
    with (
        Mosquitto(BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker,
        ExitStack() as stack,
    ):
        yield Scene(tmp_path, broker, stack)


def serve(server: Server, release: int, device: str = "pi-01") -> None:
    server.assignments.assign(device, "serve", run_id="toy", round=1, id=f"rel-{release}", release=release)
