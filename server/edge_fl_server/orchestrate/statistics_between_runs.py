"""Class statistics that a server collects between runs: from time to time, with the settings of the release's run.

A server does not know which devices have something new to add; it asks, and who has nothing says so, in messages of about a kilobyte. It
asks once in `every_s` at most, only when enough devices serve the release to make a sum, and releases only if a sum completed. Nothing
but releases is stored: the time of the last look is forgotten when the server ends.
"""

import logging
import time
from pathlib import Path

from edge_fl.console.output import print_status
from edge_fl.errors import ConfigError, ConnectError, DeadlineError, EdgeFLError, InputError, RunError
from edge_fl.release.manifests import Manifest
from edge_fl.wire.egress import STATISTICS
from edge_fl_server.mqtt.session import Server
from edge_fl_server.orchestrate import class_statistics
from edge_fl_server.orchestrate.class_statistics import StatisticsCollector
from edge_fl_server.recipes.recipe import Recipe, StatisticsConfig
from edge_fl_server.registry import runs
from edge_fl_server.release.rollout.coordinator import RolloutCoordinator
from edge_fl_server.runs.results import Results

log = logging.getLogger(__name__)
SETTLE_S = 60.0
"""After the start, for devices to connect: a sum of the first five would leave the others to the next one."""


class StatisticsBetweenRuns:
    """Collects class statistics for the current release of a coordinator. `advance` is called again and again, by one thread.

    identity: the folder of the server's certificate, if it has one.
    """

    def __init__(self, server: Server, rollout: RolloutCoordinator, identity: Path | None) -> None:
        self._server, self._rollout, self._identity = server, rollout, identity
        self._begun_s = time.monotonic()
        self._looked_s: float | None = None
        self._recipes: dict[str, Recipe] = {}
        self._collectors: dict[StatisticsConfig, StatisticsCollector] = {}

    def advance(self) -> None:
        """Collect, if it is time; this takes as long as the sums. Raises ConnectError when another server takes over."""
        manifest = self._rollout.current
        if manifest is None or STATISTICS not in manifest.sums:
            return
        recipe = self._recipe_of(manifest)
        config = class_statistics.with_auto(recipe.statistics, self._identity is not None)
        if config.sums != ("masked" if self._identity else "plain") or not self._is_due(config.every_s):
            return
        if len(self._serving(manifest)) + len(self._server.roster.full_devices()) < config.minimum:
            return
        self._looked_s = time.monotonic()
        try:
            if config not in self._collectors:
                self._collectors[config] = StatisticsCollector(config, self._server, self._identity)
            found = self._collectors[config].collect(self._rollout, recipe.release.rollout)
        except (ConnectError, DeadlineError, RunError):
            raise
        except EdgeFLError as error:
            log.info("class statistics: none collected: %s", error)
        else:
            print_status(class_statistics.summary(found, self._rollout.current))

    def _serving(self, manifest: Manifest) -> list[str]:
        """Head-only devices that are online with this release."""
        roster = self._server.roster
        states = {name: device.state for name in roster.head_devices() if (device := roster.get(name))}
        return [name for name, state in states.items() if state and state.release == manifest.release]

    def _is_due(self, every_s: float) -> bool:
        if self._looked_s is None:
            return time.monotonic() >= self._begun_s + min(SETTLE_S, every_s)
        return time.monotonic() >= self._looked_s + every_s

    def _recipe_of(self, manifest: Manifest) -> Recipe:
        """The recipe of the run that made the release; one without settings if its folder is elsewhere."""
        if manifest.run_id not in self._recipes:
            record = runs.get(self._server.journal.db, manifest.run_id)
            recipe = Recipe()
            if record:
                try:
                    recipe = Results.open(Path(record.folder)).recipe()
                except (ConfigError, InputError) as error:
                    log.warning("class statistics: %s; the defaults of [statistics] apply", error)
            self._recipes[manifest.run_id] = recipe
        return self._recipes[manifest.run_id]
