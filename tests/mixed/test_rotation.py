"""Certificate renewal during a round of a real fleet over mTLS: the update of the device still counts."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge_fl.cli import main
from edge_fl.data.samples import ClientData
from edge_fl.wire import identity
from edge_fl.wire.transport import Transport
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_broker.provision.registrar import Registrar
from edge_fl_devices.runtime.certificates import Renewal
from edge_fl_devices.runtime.connection import connector as device_connector
from edge_fl_server.mqtt.connector import connector
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs.results import Results
from tests.devices.scripted import eventually
from tests.mixed.conftest import Site, data_of

IDS = ("d1", "d2")


@dataclass
class Held:
    """Images that are loaded only after `given` is set, so that devices stay in the middle of a round until then."""

    requested: set[str] = field(default_factory=set)
    given: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.given.set()

    def __call__(self, device: str) -> ClientData:
        self.requested.add(device)
        assert self.given.wait(200)
        return data_of(device)


@dataclass
class Closed:
    """A broker with access control, two devices and a server with certificates; the one of d1 is due for renewal."""

    authority: Authority
    port: int

    def __post_init__(self) -> None:
        self.authority.bake({id: self.folder(id) for id in IDS})
        self.old = {name: identity.read(self.folder(name)) for name in ("server", "d1")}
        due = self.old["d1"].renew_at
        self.renewal = Renewal(self.old["d1"], "main", now=lambda: due)

    def folder(self, name: str) -> Path:
        return self.authority.home / name

    def connect(self, client_id: str, *arguments: Any, **options: Any) -> Transport:
        """Everybody by a certificate of their own."""
        if client_id not in IDS:
            return connector("127.0.0.1", self.port, self.folder("server"))(client_id, *arguments, **options)
        way = device_connector(identity.read(self.folder(client_id)).endpoint("127.0.0.1", self.port), "main")
        return (self.renewal.through(way) if client_id == "d1" else way)(client_id, *arguments)

    def end_the_old(self) -> None:
        """Those two certificates hold no longer; what has come for the same names since does."""
        ended = {f"{found.serial:x}" for found in self.old.values()}
        with self.authority.register.changing() as rows:
            now = self.authority.now()
            rows[:] = [replace(row, revoked=now) if row.serial in ended else row for row in rows]
        self.authority.publish()

    def is_new(self, name: str) -> bool:
        return identity.read(self.folder(name)).serial != self.old[name].serial


def patient(recipe: Recipe) -> Recipe:
    return replace(recipe, cohort=replace(recipe.cohort, deadline_s=200.0))


@pytest.mark.broker
@pytest.mark.timeout(600)
def test_a_round_survives_certificate_renewal_of_a_device_and_the_server(
    mosquitto_program: Program, tmp_path: Path
) -> None:
    authority = Authority.make(tmp_path / "home")
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = BrokerSettings(tmp_path / "broker", port=0, certificates=certificates)
    with (
        Mosquitto(register_sync.with_register(settings, authority), mosquitto_program) as broker,
        Registrar(authority, "127.0.0.1", broker.settings.port, "main"),
    ):
        closed, held, results = Closed(authority, broker.settings.port), Held(), list[Results]()
        site = Site(closed.connect, tmp_path, data=held)
        run = threading.Thread(target=lambda: results.append(site.run("fedavg", 1, edit=patient)))
        with site.fleet(IDS, {}):
            run.start()
            with held:
                assert eventually(lambda: held.requested == {*IDS})
                closed.renewal.tick()
                home = ["--identities", str(authority.home)]
                assert main(["fleet", "rotate", str(closed.folder("server")), *home]) == 0
                assert eventually(lambda: closed.is_new("d1") and closed.is_new("server"))
                closed.end_the_old()
                broker.stop()
                broker.start()
            run.join(200)
    (found,) = results
    (row,) = found.rounds()
    assert (found.state().state, len(row.responded), row.attempts) == ("completed", 2, 1)
