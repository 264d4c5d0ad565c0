"""The recorder of a run: writes round metrics, checkpoints, the summary and the device table into its results folder; totals by client.

`personal.test_acc.before` and `.after` in the summary cover all clients that measured them. With the prefix `head.` or `full.` they cover
one tier, because their meaning differs: clients that train measure before and after the final personalisation, head-only devices before
and after a new release ("before" is the model served until then). Simulated clients count as `full`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from edge_fl import metrics
from edge_fl.fields import Tier
from edge_fl.heads import wording
from edge_fl.heads.wording import MeasuredAccuracy
from edge_fl.metrics import Summary, summarise_reports
from edge_fl.wire.messages import Report
from edge_fl_server.runs import checkpoint
from edge_fl_server.runs.results import Results, RunSum
from edge_fl_server.runs.round_metrics import RoundMetrics
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.records import RoundFigures
from edge_fl_server.training.rounds import FinalResult, Plan, RoundResult, RunHooks

if TYPE_CHECKING:
    from edge_fl_server.mqtt.devices.roster import RosterDevice

WRITING_SHARE = 0.05


class Row(Struct, frozen=True):
    """One line of devices.csv. `samples` are training samples; accuracies are None if not measured.

    fitted: what the newest head is, in words (`head`: the configured kind). `after` is of `labels` labels, and its 90 % interval from `low`
    to `high` if these are few; `effective` independent ones would be as certain. `fleet` is the accuracy of the fleet's head on the same
    labels. `epsilon` is the epsilon spent by the device's updates, None without differential privacy; `statistics_bytes` are those of
    `bytes_up` that the device sent for sums of class statistics.
    """

    device: str
    tier: str
    head: str
    samples: int
    before: float | None
    after: float | None
    release: int
    bytes_down: int
    bytes_up: int
    seconds: float
    machine: str
    epsilon: float | None
    statistics_bytes: int
    fitted: str = ""
    labels: int = 0
    low: float | None = None
    high: float | None = None
    fleet: float | None = None
    effective: float | None = None

    @property
    def measured(self) -> MeasuredAccuracy:
        """The accuracy with what it was measured on."""
        return MeasuredAccuracy.of(self.after, self.labels, self.fleet, self.effective)


COLUMNS = {field: field.replace("_", " ") for field in Row.__struct_fields__}
"""Fields of a row and their column headings."""


@dataclass
class _Account:
    """Sums over one device's reports, and its latest metrics."""

    simulated: bool = False
    samples: int = 0
    release: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    statistics_bytes: int = 0
    seconds: float = 0.0
    head: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class RunTotals:
    """Thread-safe totals: `note` adds an accepted report, `measure` adds the round loop's metrics."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._lock = threading.Lock()

    def enter(self, client: str, samples: int) -> None:
        """Add a simulated client."""
        with self._lock:
            self._accounts[client] = _Account(simulated=True, samples=samples)

    def note(self, device: str, report: Report) -> None:
        """Add one accepted report of a device."""
        with self._lock:
            account = self._accounts.setdefault(device, _Account())
            account.bytes_down += report.bytes_down
            account.bytes_up += report.bytes_up
            account.seconds += max(report.seconds, 0.0)
            if not report.error:
                account.samples = report.samples
            if report.kind == "head" and not report.error:
                account.release, account.metrics = report.release, dict(report.metrics)
                account.head = report.head
            if metrics.EPSILON in report.metrics:
                account.metrics[metrics.EPSILON] = report.metrics[metrics.EPSILON]

    def add_sum(self, found: RunSum) -> None:
        """Add what the devices of a sum of class statistics sent for it."""
        with self._lock:
            for device in found.devices:
                account = self._accounts.setdefault(device, _Account())
                account.bytes_up += found.bytes_each
                account.statistics_bytes += found.bytes_each

    def measure(self, reports: Mapping[str, Mapping[str, float]]) -> None:
        """Add metrics by client; later values replace earlier ones of the same name."""
        with self._lock:
            for client, found in reports.items():
                self._accounts.setdefault(client, _Account()).metrics.update(found)

    def measured(self) -> dict[str, dict[str, float]]:
        """The metrics of each client that has any, ascending."""
        with self._lock:
            return {
                name: dict(found.metrics) for name, found in sorted(self._accounts.items()) if found.metrics
            }

    def rows(self, devices: Mapping[str, RosterDevice]) -> list[Row]:
        """One row per device that was online or reported, ascending."""
        with self._lock:
            names = sorted(self._accounts.keys() | devices.keys())
            return [_row(name, self._accounts.get(name, _Account()), devices.get(name)) for name in names]

    def summaries(self, devices: Mapping[str, RosterDevice]) -> dict[str, Summary]:
        """Each metric over all clients; with devices, also over each tier, prefixed with the tier's name."""
        found = self.measured()
        with self._lock:
            tiers = {name: _tier(account, devices.get(name)) for name, account in self._accounts.items()}
        summaries = summarise_reports(list(found.values()))
        for prefix, members in (("head", {Tier.HEAD.value}), ("full", {Tier.FULL.value, "simulated"})):
            of_tier = summarise_reports([report for name, report in found.items() if tiers[name] in members])
            summaries |= {f"{prefix}.{name}": summary for name, summary in of_tier.items()}
        return summaries


def _row(name: str, account: _Account, device: RosterDevice | None) -> Row:
    capability = device.capability if device else None
    samples = account.samples or (capability.samples if capability else 0)
    found = MeasuredAccuracy.of_report(account.metrics)
    low, high = found.interval or (None, None)
    return Row(
        name,
        _tier(account, device),
        capability.head if capability else "",
        samples,
        account.metrics.get(metrics.PERSONAL_BEFORE),
        account.metrics.get(metrics.PERSONAL_AFTER),
        account.release,
        account.bytes_down,
        account.bytes_up,
        account.seconds,
        capability.machine if capability else "",
        account.metrics.get(metrics.EPSILON),
        account.statistics_bytes,
        wording.fitted_words(account.head, account.samples, account.metrics),
        found.n,
        low,
        high,
        found.fleet,
        found.effective if found.accuracy is not None else None,
    )


def _tier(account: _Account, device: RosterDevice | None) -> str:
    if account.simulated:
        return "simulated"
    return device.capability.tier if device and device.capability else "unknown"


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
        figures = {name: getattr(result, name) for name in RoundFigures.__struct_fields__}
        self._results.append_round(
            RoundMetrics(
                **figures,
                rejected=self._rejected(),
                seconds=round(result.seconds, 3),
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
