"""A run by round: metrics, selected and responding clients, dropped and rejected reports.

Counts and means come from the registry, std and bottom decile from the run's folder where the dashboard can read it. A device that was
requested several times in a round counts once: by its success, else by its newest request.
"""

from collections import Counter
from collections.abc import Mapping
from math import nan
from pathlib import Path

from msgspec import Struct
from sqlalchemy import case, func, select

from edge_fl.metrics import PERSONAL_AFTER, PERSONAL_BEFORE, Summary, summarise_reports
from edge_fl_server.registry import Database, fleets, runs
from edge_fl_server.registry.devices import of_fleet
from edge_fl_server.registry.tables import RoundRecord, RunRecord, devices, rejections, requests
from edge_fl_server.runs import round_metrics

NEWEST_RUNS = 100
PERSONAL = (PERSONAL_AFTER, PERSONAL_BEFORE)
UNMEASURED = Summary(nan, nan, nan, nan, 0)
DROPPED = case(
    ((requests.c.state == "failed") & (requests.c.reason != ""), requests.c.reason),
    (requests.c.state.in_(("failed", "timed_out", "cancelled")), requests.c.state),
    else_="",
)
"""Why a request had no success; "" for all others."""


class MetricMean(Struct, frozen=True):
    """A mean over `clients` clients."""

    value: float
    clients: int


class RoundRow(Struct, frozen=True):
    """One round. `dropped` and `rejected` count by reason; `summaries` is empty if the run's folder cannot be read."""

    record: RoundRecord
    summaries: Mapping[str, Summary] = {}
    dropped: dict[str, int] = {}
    rejected: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes transferred in both directions."""
        return self.record.bytes_down + self.record.bytes_up

    def mean(self, *names: str) -> MetricMean | None:
        """The first of these metrics that was measured."""
        for name in names:
            if name in self.summaries:
                return MetricMean(self.summaries[name].mean, self.summaries[name].clients)
            if (value := self.record.metrics.get(name)) is not None:
                return MetricMean(value, self.record.clients.get(name, 0))
        return None

    @property
    def spread(self) -> Summary:
        """The summary of the personal accuracy; NaN if it was not measured."""
        return next((self.summaries[name] for name in PERSONAL if name in self.summaries), UNMEASURED)


class RunPage(Struct, frozen=True):
    """A run, its rounds in order, and the fleet's runs, the newest first.

    `current` counts the devices of the current round by state; `final` are the metrics of the final personalisation, `heads` those of
    head-only devices, whose "before" is the model that they served before. `online`: a server is online.
    """

    run: RunRecord
    rounds: tuple[RoundRow, ...]
    others: tuple[RunRecord, ...]
    current: dict[str, int] = {}
    final: Mapping[str, Summary] = {}
    heads: Mapping[str, Summary] = {}
    online: bool = True

    def newest(self, *names: str) -> tuple[MetricMean, str] | None:
        """The first of these metrics in the final personalisation or else the newest round that measured one, and which it was."""
        for name in names:
            if name in self.final:
                return MetricMean(self.final[name].mean, self.final[name].clients), "final"
        for row in reversed(self.rounds):
            if mean := row.mean(*names):
                return mean, f"round {row.record.round}"
        return None


def page(db: Database, fleet: str, run: str = "") -> RunPage | None:
    """A run of the fleet, by default the newest; None if there is none."""
    known = runs.listed(db, fleet)[:NEWEST_RUNS]
    record = next((one for one in known if run in ("", one.run)), None)
    if record is None:
        return None
    lines = round_metrics.latest(round_metrics.lines(Path(record.folder) / round_metrics.FILE))
    summaries = {line.round: line.metrics for line in lines if not line.final}
    dropped, current = _requested(db, record.run)
    rejected = _rejected(db, record.run)
    rows = tuple(
        RoundRow(
            one,
            summaries.get(one.round, {}),
            dropped.get(one.round, {}),
            rejected.get(one.round, {}),
        )
        for one in runs.rounds_of(db, record.run)
    )
    final = next((line.clients for line in lines if line.final), {})
    head_only = head_only_devices(db, fleet) if final else frozenset()
    return RunPage(
        record,
        rows,
        tuple(known),
        current,
        final=summarise_reports([found for name, found in final.items() if name not in head_only]),
        heads=summarise_reports([found for name, found in final.items() if name in head_only]),
        online=fleets.presence(db, fleet).online,
    )


def head_only_devices(db: Database, fleet: str) -> frozenset[str]:
    """The names of the head-only devices."""
    heads = of_fleet(fleet) & (devices.c.capability["tier"].as_string() == "head")
    return frozenset(row.device for row in db.rows(select(devices.c.device).where(heads)))


def _rejected(db: Database, run: str) -> dict[int, dict[str, int]]:
    """Round -> reason -> number of rejected reports."""
    of_run = rejections.c.run == run
    query = select(rejections.c.round, rejections.c.reason, func.count()).where(of_run)
    counts: dict[int, dict[str, int]] = {}
    for round, reason, count in db.rows(query.group_by(rejections.c.round, rejections.c.reason)):
        counts.setdefault(round, {})[reason] = count
    return counts


def _requested(db: Database, run: str) -> tuple[dict[int, dict[str, int]], dict[str, int]]:
    """Round -> reason -> devices without success, and state -> devices of the newest round."""
    succeeded = case((requests.c.state == "succeeded", 0), else_=1)
    place = func.row_number().over(
        partition_by=(requests.c.round, requests.c.device),
        order_by=(succeeded, requests.c.requested_at.desc(), requests.c.id.desc()),
    )
    columns = (requests.c.round, requests.c.state, DROPPED.label("reason"), place.label("place"))
    each = select(*columns).where(requests.c.run == run).subquery()
    query = select(each.c.round, each.c.state, each.c.reason, func.count()).where(each.c.place == 1)
    dropped: dict[int, Counter[str]] = {}
    states: dict[int, Counter[str]] = {}
    for round, state, reason, count in db.rows(query.group_by(each.c.round, each.c.state, each.c.reason)):
        states.setdefault(round, Counter())[state] += count
        if reason:
            dropped.setdefault(round, Counter())[reason] += count
    newest = states[max(states)] if states else {}
    return {round: dict(counts) for round, counts in dropped.items()}, dict(newest)
