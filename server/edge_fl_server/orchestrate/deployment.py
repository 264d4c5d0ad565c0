"""A run's deployment to devices: full devices train, head-only devices receive releases of the extractor.

The first release comes after round 1, so that heads serve early; then every `release.every` rounds, and after the last.
"""

from collections.abc import Iterator, Sequence

from edge_fl.console.progress import Progress
from edge_fl.errors import DeadlineError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from edge_fl_server.mqtt.devices.roster import Roster
from edge_fl_server.orchestrate import registration
from edge_fl_server.orchestrate.advice import Advice
from edge_fl_server.orchestrate.releases import RunReleases
from edge_fl_server.orchestrate.screening import Screening
from edge_fl_server.orchestrate.statistics import StatisticsCollector
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.registry import Database
from edge_fl_server.runs.results import Results
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, RoundResult, RunHooks


class WaitForDevices:
    """Waits for as many full devices as the recipe needs."""

    def __init__(self, recipe: Recipe, roster: Roster, progress: Progress) -> None:
        self._roster, self._progress, self._wait_s = roster, progress, recipe.cohort.wait_s
        self._needed = 0 if recipe.source in ("simulated", "none") else recipe.cohort.min_devices

    def __call__(self) -> None:
        """Raises DeadlineError after `cohort.wait_s`."""
        if (online := len(self._roster.full_devices())) < self._needed:
            self._progress.print(f"waiting for {self._needed} full devices, {online} online")
            self._roster.wait_for(full=self._needed, deadline_s=self._wait_s)


class Deployment(RunHooks):
    """What happens to devices in the course of a run. Without `releases` the method shares no extractor."""

    def __init__(
        self,
        method: Method,
        db: Database,
        results: Results,
        progress: Progress,
        wait_for_devices: WaitForDevices,
        screening: Screening,
        releases: RunReleases | None,
        statistics: StatisticsCollector | None,
        advice: Advice,
    ) -> None:
        self._method, self._db, self._results, self._progress = method, db, results, progress
        self._wait_for_devices, self._screening = wait_for_devices, screening
        self._releases, self._statistics, self._advice = releases, statistics, advice
        self._use_head_updates = True

    def before_round(self, round: int) -> None:
        self._wait_for_devices()

    def head_updates(self) -> Sequence[Update]:
        return self._releases.head_updates() if self._releases and self._use_head_updates else ()

    def screen(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        return self._screening.round(updates, shared)

    def screen_final(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        return self._screening.final(updates, shared)

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        """Record the round, release if due. Raises StoppedError if the registry asks the run to stop."""
        registration.record_round(self._db, self._results.id, result)
        self._screening.record(result.round)
        self._screening.record_verdict(result)
        if self._releases and self._releases.is_due(result.round):
            method = self._method.at(result.round)
            self._releases.release(method, result.shared, result.round, collect=not method.head_tier.final)
        registration.require_not_stopped(self._db, self._results)

    def before_final(self, method: Method, shared: Parts, round: int) -> None:
        """Release before the final personalisation if heads contribute to it, and give devices time to return."""
        self._use_head_updates = method.head_tier.final
        if self._releases and self._use_head_updates:
            self._releases.release(method, shared, round, collect=True)
            self._releases.wait_for_heads()
        try:
            self._wait_for_devices()
        except DeadlineError as error:
            self._progress.print(f"final personalisation without the missing devices: {error}")

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        """Release the final extractor, wait for heads on it, and release it again with a prior if the recipe asks for one."""
        self._screening.record(result.round)
        if self._releases is None:
            return
        self._releases.release(result.method, result.shared, result.round)
        self._advice.idle_devices()
        self._releases.wait_for_heads()
        if self._statistics:
            self._statistics.collect(self._releases.rollout)
            self._releases.wait_for_heads()
        self._advice.pictures_outside()
        self._advice.accuracies()
