"""Screening of a run's updates: stated weights are bounded, outliers left out, and both the screen's and the gate's findings recorded."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping

from edge_fl.failures import Failure
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.screening import with_bounded_weight
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl_server.mqtt.session import Server
from edge_fl_server.recipes.recipe import ValidationConfig
from edge_fl_server.registry import runs
from edge_fl_server.training.rounds import RoundResult

log = logging.getLogger(__name__)


class Screening:
    """The screen of a run's updates as `[validation]` says; repeated outliers are quarantined."""

    def __init__(self, method: Method, validation: ValidationConfig, server: Server, run_id: str) -> None:
        self._stated, self._max_weight = method.stated_weight, validation.max_weight
        self._screen = steps.screen(method, validation.max_norm) if validation.max_norm else None
        self._server, self._run_id = server, run_id
        self._rejected: Counter[str] = Counter()

    def round(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        """The updates of a round that count."""
        if self._stated and self._max_weight:
            updates = with_bounded_weight(updates, self._stated, self._max_weight)
        return self._screen.round(updates, shared) if self._screen else updates

    def final(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        """The updates of the final personalisation that count."""
        return self._screen.final(updates, shared) if self._screen else updates

    def rejected(self) -> Mapping[str, int]:
        """Reports and packets that were rejected since the last call, by reason: late, malformed, outlier (dropped update), ..."""
        new = self._server.inbox.counts - self._rejected
        self._rejected.update(new)
        new[Failure.OUTLIER] = len(self._screen.dropped) if self._screen else 0
        return {reason: count for reason, count in sorted(new.items()) if count and reason != "accepted"}

    def record(self, round: int) -> None:
        """Store the outlier scores of devices."""
        if self._screen:
            for id, why in self._screen.dropped.items():
                log.warning(
                    "round %d: the update of %s was not used: %s", round, id, why, extra={"device": id}
                )
            self._store(round, self._screen.scores, self._screen.outliers)

    def record_verdict(self, result: RoundResult) -> None:
        """Count what the round gate decided, and store the outlier scores of the devices named."""
        if result.verdict:
            journal, table = self._server.journal, self._server.roster.table
            named = {id: score for id, score in result.verdict.named.items() if id in table}
            why = f"round {result.round} was worse with its update"
            runs.count_verdict(journal.db, journal.fleet, result.verdict.outcome, len(named))
            self._store(result.round, named, {id: why for id, score in named.items() if score >= 1})

    def _store(self, round: int, scores: Mapping[str, float], outliers: Mapping[str, str]) -> None:
        table = self._server.roster.table
        self._server.journal.record_screening(
            self._run_id,
            round,
            {id: score for id, score in scores.items() if id in table},
            {id: why for id, why in outliers.items() if id in table},
        )
