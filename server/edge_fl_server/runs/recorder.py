"""The recorder of a run: writes round metrics, checkpoints, the summary and the device table into the run's results folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from edge_fl.metrics import summarise_reports
from edge_fl_server.runs import checkpoint
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics
from edge_fl_server.runs.totals import RunTotals
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, Plan, RoundResult, RunHooks

if TYPE_CHECKING:
    from edge_fl_server.mqtt.devices.roster import RosterDevice

WRITING_SHARE = 0.05


class Recorder(RunHooks):
    """Records a run, simulated or with devices, in the same files and with the same meaning.

    `rejected` returns and resets the counts of rejected reports by reason. With `every_round` each round can be resumed from, which devices
    need because they go on. Otherwise checkpoints take at most WRITING_SHARE of the time, and the final state is kept, too.
    """

    def __init__(
        self,
        results: Results,
        plan: Plan,
        totals: RunTotals,
        rejected: Callable[[], Mapping[str, int]] = dict,
        *,
        every_round: bool = True,
    ) -> None:
        self._results, self._plan, self._totals = results, plan, totals
        self._rejected, self._every_round = rejected, every_round
        self._saved_s = self._writing_s = 0.0  # time of the last checkpoint, and how long it took

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        self._totals.measure(result.metrics)
        self._results.record_engine(clients.engine, clients.engine_timing)
        self._results.append_round(
            RoundMetrics(
                round=result.round,
                selected=result.selected,
                responded=result.responded,
                head_updates=result.head_updates,
                attempts=result.attempts,
                staleness=result.staleness,
                rejected=self._rejected(),
                verdict=result.verdict,
                budget_exhausted=result.exhausted,
                seconds=round(result.seconds, 3),
                bytes_down=result.bytes_down,
                bytes_up=result.bytes_up,
                metrics=summarise_reports(list(result.metrics.values())),
                clients=result.metrics,
            )
        )
        start_s = time.monotonic()
        if self._every_round or self._writing_s <= WRITING_SHARE * (start_s - self._saved_s):
            self._save(result, clients)
            self._saved_s = time.monotonic()
            self._writing_s = self._saved_s - start_s

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        self._totals.measure(result.metrics)
        self._results.record_engine(clients.engine, clients.engine_timing)
        if not self._every_round:
            self._save(result, clients, final=True)

    def _save(self, result: RoundResult | FinalResult, clients: Clients, *, final: bool = False) -> None:
        folder, personal = self._results.checkpoints, clients.personal_state()
        checkpoint.save(folder, result.round, self._plan, result.shared, personal, final=final)

    def conclude(self, devices: Mapping[str, RosterDevice]) -> None:
        """Write the summary, the device table and the final line, however the run ended. `devices` are those known to the server."""
        clients = self._totals.measured()
        self._results.write_summary(self._results.recipe().source, self._totals.summaries(devices))
        self._results.write_devices([msgspec.to_builtins(row) for row in self._totals.rows(devices)])
        metrics = summarise_reports(list(clients.values()))
        self._results.append_round(
            RoundMetrics(round=self._results.reached, final=True, metrics=metrics, clients=clients)
        )
