"""A run with devices: its connection to the broker, its entry in the registry, its rounds with the deployment.

Simulations do not import this module, because the broker's client, the registry and ONNX come with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_fl.console.progress import Progress
from edge_fl.wire.topics import Topics
from edge_fl_server.mqtt import reader
from edge_fl_server.mqtt.connector import denied, fleet_authorities
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.orchestrate.deployment import Deployment, registered
from edge_fl_server.orchestrate.execute import RunResult, execute, simulated_clients
from edge_fl_server.orchestrate.setup import RunRequest, RunSetup
from edge_fl_server.registry import Database, reports, runs
from edge_fl_server.release import ownership
from edge_fl_server.release.repository import Repository, require_grown
from edge_fl_server.release.rollout.director import Director
from edge_fl_server.runs.checkpoint import Checkpoint
from edge_fl_server.runs.recorder import Recorder
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.totals import RunTotals
from edge_fl_server.training.clients import Clients, NoClients
from edge_fl_server.training.hybrid import HybridClients
from edge_fl_server.training.rounds import CombinedHooks, Plan, RunHooks


@dataclass(frozen=True)
class Devices:
    """The connected devices of a run; releases are in the folder `home`."""

    server: Server
    home: Path

    def registered(self, results: Results) -> AbstractContextManager[None]:
        """Enter the run into the registry while it goes on, and its final state afterwards."""
        return registered(self.server.journal.db, results)

    def unmeasured(self, results: Results) -> str:
        """Why no device could evaluate or personalise; "" where one could, or none was requested to."""
        return runs.unmeasured(self.server.journal.db, results.id)

    def execute(
        self,
        setup: RunSetup,
        results: Results,
        totals: RunTotals,
        progress: Progress,
        saved: Checkpoint | None,
        hooks: RunHooks,
    ) -> RunResult:
        """Run all rounds and releases. Raises as `execute`, and DeadlineError when too few devices connect."""
        for record in reports.of_run(self.server.journal.db, results.id):  # from before an interruption
            totals.note(record.device, reports.report_of(record))
        deployment = Deployment(setup, self.server, results, totals, progress, self.home)
        recorder = Recorder(results, Plan.of(setup.recipe, setup.method), totals, deployment.rejected)
        try:
            clients = _clients(setup, deployment)
            return execute(setup, clients, CombinedHooks(recorder, hooks, deployment), progress, saved)
        finally:
            deployment.close()
            recorder.conclude(self.server.roster.table)


@contextmanager
def connect(request: RunRequest, setup: RunSetup) -> Iterator[Devices]:
    """Connect to the broker and open the registry for the block. Raises InputError and ConnectError."""
    assert request.connect is not None
    _require_known_classes(request, setup)
    broker = request.recipe.broker
    quarantine_after, revoked = request.recipe.validation.quarantine_after, denied(broker.identity)
    with ExitStack() as stack:
        db = stack.enter_context(closing(Database.open(request.registry)))
        retained = reader.server_state(request.connect, Topics(broker.fleet), reader.LIMITS)
        ownership.require(db, broker.fleet, request.home, retained, adopt=request.adopt)
        journal = stack.enter_context(
            Journal(db, broker.fleet, quarantine_after=quarantine_after, denied=revoked)
        )
        online = connected(
            request.connect,
            journal,
            takeover=request.takeover,
            workers=request.workers,
            director=Director(Repository(request.home / broker.fleet), broker.fleet),
            authorities=fleet_authorities(broker.identity),
        )
        server = stack.enter_context(online)
        ownership.take(db, broker.fleet, request.home, adopt=request.adopt)
        yield Devices(server, request.home)


def _clients(setup: RunSetup, deployment: Deployment) -> Clients:
    """The clients that train, by the recipe's source."""
    if setup.recipe.source == "none":
        return NoClients()
    if setup.recipe.source == "fleet":
        return deployment.devices
    simulated = simulated_clients(setup)
    return simulated if setup.recipe.source == "simulated" else HybridClients(deployment.devices, simulated)


def _require_known_classes(request: RunRequest, setup: RunSetup) -> None:
    """Raise InputError if a run that trains nothing reorders or removes classes that devices have heads for."""
    folder = request.home / setup.recipe.broker.fleet
    if setup.recipe.source == "none" and (folder / "metadata").is_dir():
        require_grown(setup.spec.classes, Repository(folder).releases())
