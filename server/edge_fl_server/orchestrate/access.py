"""How a server gets at a fleet: the broker, the registry and the signed releases, for a run and between runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_fl.wire.topics import Topics
from edge_fl_server.mqtt import connector
from edge_fl_server.mqtt.connector import LIMITS, LeaseLimits, ServerConnect, denied, fleet_authorities
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.registry import Database
from edge_fl_server.registry.database import location
from edge_fl_server.release import ownership
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.director import Director


@dataclass(frozen=True)
class FleetAccess:
    """The fleet `fleet` with the releases in `home`/`fleet`, reached through `connect`.

    `database` is the registry's path or URL; the default is a file in the folder `server` next to `home`. `identity` is the folder of the
    server's certificate, if it has one. With `workers` separate processes validate the updates. `adopt`: also a fleet of another registry.
    """

    connect: ServerConnect
    fleet: str
    home: Path
    database: str = ""
    identity: str | Path = ""
    workers: bool = False
    adopt: bool = False

    @property
    def registry(self) -> str:
        """The registry's path or URL."""
        return location(self.database, self.home)

    def repository(self) -> Repository:
        """Open the fleet's releases; the first time their keys are created."""
        return Repository(self.home / self.fleet)

    @contextmanager
    def online(
        self,
        db: Database,
        *,
        takeover: bool = False,
        yields: bool = False,
        quarantine_after: int = 3,
        limits: LeaseLimits = LIMITS,
    ) -> Iterator[Server]:
        """Connect a server of this registry for the block. Raises InputError and ConnectError."""
        retained = connector.server_state(self.connect, Topics(self.fleet), limits)
        ownership.require(db, self.fleet, self.home, retained, adopt=self.adopt)
        revoked = denied(self.identity)
        with (
            Journal(db, self.fleet, quarantine_after=quarantine_after, denied=revoked) as journal,
            connected(
                self.connect,
                journal,
                takeover=takeover,
                yields=yields,
                workers=self.workers,
                director=Director(self.repository(), self.fleet),
                authorities=fleet_authorities(self.identity),
            ) as server,
        ):
            ownership.take(db, self.fleet, self.home, adopt=self.adopt)
            yield server
