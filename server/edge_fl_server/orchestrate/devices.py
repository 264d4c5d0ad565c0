"""A run with devices: its connection to the broker, its entry in the registry, its rounds with the deployment.

Simulations do not import this module, because the broker's client, the registry and ONNX come with it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_fl.console.progress import Progress
from edge_fl_server.mqtt.device_clients import DeviceClients, DeviceLimits
from edge_fl_server.mqtt.session import Server
from edge_fl_server.orchestrate.deployment import (
    Advice,
    Deployment,
    Screening,
    WaitForDevices,
    registered,
    rest_heads,
)
from edge_fl_server.orchestrate.execute import RunResult, execute, simulated_clients
from edge_fl_server.orchestrate.releases import RunReleases
from edge_fl_server.orchestrate.run_setup import RunSetup
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.orchestrate.statistics import StatisticsCollector
from edge_fl_server.registry import Database, reports, runs
from edge_fl_server.release import website
from edge_fl_server.release.repository import Repository, require_grown
from edge_fl_server.runs.checkpoint import Checkpoint
from edge_fl_server.runs.recorder import Recorder, RunTotals
from edge_fl_server.runs.results import Results
from edge_fl_server.selectors import selection
from edge_fl_server.training.clients import Clients, HybridClients, NoClients
from edge_fl_server.training.rounds import CombinedHooks, RunHooks


@dataclass(frozen=True)
class Devices:
    """The connected devices of a run, and the fleet's releases."""

    server: Server
    repository: Repository

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
        server, recipe = self.server, setup.recipe
        db, fleet, where = server.journal.db, server.journal.fleet, recipe.cohort.where
        for record in reports.of_run(db, results.id):  # from before an interruption
            totals.note(record.device, reports.report_of(record))
        selection.require(db, fleet, where, recipe.release.rollout.where)
        server.roster.train_only(selection.Selection(db, fleet, where))
        releases = self._releases(setup, results, totals, progress)
        full = self._full_devices(setup, results, totals)
        screening = Screening(setup.method, recipe.validation, server, results.id)
        sums = recipe.statistics.sums != "none"
        deployment = Deployment(
            setup.method,
            db,
            results,
            progress,
            WaitForDevices(recipe, server.roster, progress),
            screening,
            releases,
            StatisticsCollector(recipe, server, results, totals, progress) if sums else None,
            Advice(recipe, server, totals, progress),
        )
        recorder = Recorder(results, setup.plan, totals, screening.rejected)
        try:
            clients = _clients(setup, full)
            return execute(setup, clients, CombinedHooks(recorder, hooks, deployment), progress, saved)
        finally:
            full.close()
            if releases:
                releases.close()
            recorder.conclude(server.roster.table)

    def _releases(
        self, setup: RunSetup, results: Results, totals: RunTotals, progress: Progress
    ) -> RunReleases | None:
        """None for a method without an extractor to release: head-only devices rest then."""
        if setup.method.exports:
            if setup.recipe.release.website:
                website.keep(self.repository, Path(setup.recipe.release.website))
            return RunReleases(setup, self.server, self.repository, results, totals, progress)
        title = setup.method.title
        progress.print(f"{title} shares no extractor: head-only devices receive nothing from this run")
        rest_heads(self.server, results.id, title)
        return None

    def _full_devices(self, setup: RunSetup, results: Results, totals: RunTotals) -> DeviceClients:
        cohort, validation = setup.recipe.cohort, setup.recipe.validation
        limits = DeviceLimits(
            cohort.deadline_s,
            max_growth=validation.max_growth,
            max_weight=validation.max_weight,
            max_staleness=cohort.max_staleness if cohort.buffer_size else None,
        )
        return DeviceClients(
            self.server, results.id, setup.spec, limits, on_report=totals.note, torch_device=setup.device
        )


@contextmanager
def connected(access: FleetAccess, setup: RunSetup, *, takeover: bool) -> Iterator[Devices]:
    """Open the registry and connect to the broker for the block. Raises InputError and ConnectError."""
    recipe = setup.recipe
    if recipe.source == "none" and (access.home / access.fleet / "metadata").is_dir():
        require_grown(
            setup.spec.classes, access.repository().releases()
        )  # devices have heads for these classes
    with closing(Database.open(access.registry)) as db:
        after = recipe.validation.quarantine_after
        with access.online(db, takeover=takeover, quarantine_after=after) as server:
            yield Devices(server, access.repository())


def _clients(setup: RunSetup, full: DeviceClients) -> Clients:
    """The clients that train, by the recipe's source."""
    if setup.recipe.source == "none":
        return NoClients()
    if setup.recipe.source == "fleet":
        return full
    simulated = simulated_clients(setup)
    return simulated if setup.recipe.source == "simulated" else HybridClients(full, simulated)
