"""The recorder of a run: writes round metrics, checkpoints, the summary and the device table into the run's results folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from edge_fl.metrics import summarise_reports
from server.mqtt.devices.roster import Device
from server.runs import checkpoint
from server.runs.results import Results
from server.runs.round_metrics import RoundMetrics
from server.runs.totals import RunTotals
from server.training.fleet import Fleet
from server.training.rounds import FinalResult, Plan, RoundResult, RunHooks


class Recorder(RunHooks):
    """Records a run, simulated or with devices, in the same files and with the same meaning.

    `rejected` returns and resets the counts of rejected reports by reason. With `checkpoints` every round can be resumed from; otherwise
    only the final state is kept.
    """

    def __init__(
        self,
        results: Results,
        plan: Plan,
        totals: RunTotals,
        rejected: Callable[[], Mapping[str, int]] = dict,
        *,
        checkpoints: bool = True,
    ) -> None:
        self._results, self._plan, self._totals = results, plan, totals
        self._rejected, self._checkpoints = rejected, checkpoints

    def after_round(self, result: RoundResult, fleet: Fleet) -> None:
        self._totals.measure(result.metrics)
        self._results.append_round(
            RoundMetrics(
                round=result.round,
                selected=result.selected,
                responded=result.responded,
                head_updates=result.head_updates,
                attempts=result.attempts,
                staleness=result.staleness,
                rejected=self._rejected(),
                budget_exhausted=result.exhausted,
                seconds=round(result.seconds, 3),
                bytes_down=result.bytes_down,
                bytes_up=result.bytes_up,
                metrics=summarise_reports(list(result.metrics.values())),
                clients=result.metrics,
            )
        )
        if self._checkpoints:
            checkpoint.save(
                self._results.checkpoints, result.round, self._plan, result.shared, fleet.personal_state()
            )

    def after_final(self, result: FinalResult, fleet: Fleet) -> None:
        self._totals.measure(result.metrics)
        if not self._checkpoints:
            checkpoint.save(
                self._results.checkpoints, result.round, self._plan, result.shared, fleet.personal_state()
            )

    def conclude(self, devices: Mapping[str, Device]) -> None:
        """Write the summary, the device table and the final line, however the run ended. `devices` are those known to the server."""
        clients = self._totals.measured()
        self._results.write_summary(self._results.recipe().source, self._totals.summaries(devices))
        self._results.write_devices([msgspec.to_builtins(row) for row in self._totals.rows(devices)])
        metrics = summarise_reports(list(clients.values()))
        self._results.append_round(
            RoundMetrics(round=self._results.reached, final=True, metrics=metrics, clients=clients)
        )
