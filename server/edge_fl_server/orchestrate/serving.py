"""How a server gets at a fleet (broker, registry, releases), and serves it without a run: roll-outs, devices that join, reports of heads,
class statistics.

The server of a run takes the fleet over; this one then waits, and continues after the run. Everything that it does follows from the
registry and the signed releases, so that it may end at any moment, also by kill -9, and another one continues.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edge_fl.console.output import print_status
from edge_fl.errors import ConnectError, DeadlineError, RunError, nearest
from edge_fl.wire.egress import STATISTICS
from edge_fl.wire.topics import Topics
from edge_fl_server.mqtt import connector
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import LIMITS, LeaseLimits, ServerConnect, denied, fleet_authorities
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.orchestrate.statistics_between_runs import StatisticsBetweenRuns
from edge_fl_server.registry import Database, fleets, runs
from edge_fl_server.registry.database import location
from edge_fl_server.release import ownership
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.coordinator import CoordinatorOptions, RolloutCoordinator
from edge_fl_server.release.rollout.director import Director

POLL_S = 0.5
SERVING = CoordinatorOptions(resume=True, sums=[STATISTICS])


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
    identity: Path | None = None
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
        if (others := fleets.known(db)) and self.fleet not in others:
            print_status(f"fleet {self.fleet!r}: a new one{nearest(self.fleet, others)}")
        retained = connector.server_state(self.connect, Topics(self.fleet), limits)
        ownership.require(db, self.fleet, self.home, retained, adopt=self.adopt)
        revoked = denied(self.identity)
        with Journal(db, self.fleet, quarantine_after=quarantine_after, denied=revoked) as journal:
            connection = ServerConnection(
                self.connect,
                journal,
                takeover=takeover,
                yields=yields,
                workers=self.workers,
                director=Director(self.repository(), self.fleet),
                authorities=fleet_authorities(self.identity),
            )
            with connected(connection) as server:
                ownership.take(db, self.fleet, self.home, adopt=self.adopt)
                yield server


@dataclass(frozen=True)
class FleetServer:
    """Serves a fleet between runs.

    A run whose server goes offline keeps the fleet for `return_s`, and no more than twice that, because its connection may return.
    """

    access: FleetAccess
    db: Database
    limits: LeaseLimits = LIMITS
    return_s: float = 60.0

    def serve(self, stopping: threading.Event) -> None:
        """Serve until `stopping` is set; wait while another server is online, or broker or registry are not.

        Raises InputError and ArtefactError if the folder of releases or its keys cannot be used.
        """
        fleet, printed, missed, lost = f"fleet {self.access.fleet!r}", "", False, ""
        while not stopping.is_set():
            run = ""
            try:
                run = self._unfinished_run()
                if boot := connector.online_server(
                    self.access.connect, Topics(self.access.fleet), self.limits
                ):
                    run = self._unfinished_run()  # its server is online before it is in the registry
                    who = f"server {boot}" + (f" of run {run}" if run else "")
                    reason = (
                        f"{fleet}: handed over to {who}, as planned" if lost else f"{fleet}: {who} is online"
                    )
                    missed = False
                elif run and not missed:
                    reason, missed = f"run {run} has not ended; its server is offline and may return", True
                elif lost:
                    reason = f"{fleet}: {lost}"
                else:
                    lost, printed = self._serve(stopping), ""
                    continue  # look first whether another server took over
            except (ConnectError, DeadlineError, RunError) as error:
                reason, missed = error.message, False
            lost = ""
            if reason != printed:
                print_status(f"{reason}; waiting")
            printed = reason
            self._wait(stopping, run)

    def _wait(self, stopping: threading.Event, run: str) -> None:
        """Wait `lease_s`; for a run until it has ended, at most `return_s`: each look at the broker may end the connection of a reader."""
        until = time.monotonic() + (self.return_s if run else self.limits.lease_s)
        with suppress(RunError):
            while not stopping.wait(POLL_S) and time.monotonic() < until:
                if run and self._unfinished_run() != run:
                    break

    def _unfinished_run(self) -> str:
        return next(
            (run.run for run in runs.listed(self.db, self.access.fleet) if run.state == "running"), ""
        )

    def _serve(self, stopping: threading.Event) -> str:
        """Serve -> why the connection ended, which another server's taking over does as well; "" once `stopping` is set.

        Raises ConnectError, ConfigError if the fleet is that of another registry.
        """
        fleet = self.access.fleet
        with (
            self.access.online(self.db, yields=True, limits=self.limits) as server,
            closing(RolloutCoordinator(server, self.access.repository(), SERVING)) as rollout,
        ):
            runs.abandon(self.db, fleet)
            stages = rollout.stages
            release = f"release {stages.release} {stages.state}" if stages else "no release yet"
            print_status(f"fleet {fleet!r}: online, {release}; 'edge-fl server run' takes over for a run")
            statistics = StatisticsBetweenRuns(server, rollout, self.access.identity)
            while not stopping.wait(POLL_S) and not server.connection.lost:
                statistics.advance()
            return server.connection.lost
