"""The registry as Prometheus metrics, read at each scrape; counters are sums over the registry, so they survive a restart of the server."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection, func, select

from edge_fl_server.registry import Database
from edge_fl_server.registry.registered_devices import STANDING, of_fleet
from edge_fl_server.registry.tables import (
    devices,
    rejection_counts,
    releases,
    reports,
    requests,
    rollouts,
    rounds,
    runs,
    verdict_counts,
)
from edge_fl_server.training.records import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN = ("running", "paused")
RECENT = 100  # rounds, among which the last evaluated one is looked for
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[SummaryMetricFamily]


def text(db: Database, fleet: str) -> bytes:
    """The metrics of a fleet in Prometheus' text format. Raises RunError when the registry does not respond."""
    return generate_latest(FleetCollector(db, fleet))


class FleetCollector(Collector):
    """Collector of prometheus-client for one fleet of a registry."""

    def __init__(self, db: Database, fleet: str) -> None:
        self._db, self._fleet = db, fleet

    def collect(self) -> Iterator[Metric]:
        """Every metric, read in one transaction."""
        with self._db.reading() as connection:
            for kind, name, labels, help, rows in _metrics(connection, self._fleet):
                names = labels.split()
                family = kind(f"edge_fl_{name}", help, labels=("fleet", *names))
                for row in rows:
                    family.add_metric((self._fleet, *map(str, row[: len(names)])), *row[len(names) :])
                yield family


def _metrics(
    connection: Connection, fleet: str
) -> Iterator[tuple[Kind, str, str, str, Iterable[Sequence[Any]]]]:
    """Kind, name, labels and help of each metric, and its samples: the labels' values, then its value, or count and sum of a summary."""

    def rows(*columns: Any, where: Any, by: Sequence[Any] = ()) -> Sequence[Any]:
        return connection.execute(select(*by, *columns).where(where).group_by(*by)).all()

    def counts(table: Any, *by: Any) -> Sequence[Any]:
        """The number of rows of the fleet by these columns, without removed devices."""
        mine = of_fleet(fleet) if table is devices else table.c.fleet == fleet
        return rows(func.count(), where=mine, by=by)

    gauge, counter, summary = GaugeMetricFamily, CounterMetricFamily, SummaryMetricFamily
    tier = func.coalesce(devices.c.capability["tier"].as_string(), "unknown")
    by_status = counts(devices, devices.c.status, tier)
    yield gauge, "devices", "status tier", "Devices by status.", by_status
    by_standing = dict(counts(devices, STANDING))
    blocked = [(why, by_standing.get(why, 0)) for why in ("quarantined", "revoked")]
    yield gauge, "devices_blocked", "why", "Devices whose reports are rejected.", blocked
    help = "Devices whose newest update was an outlier, with a score of at least 1."
    outliers = rows(func.count(), where=of_fleet(fleet) & (devices.c.outlier_score >= 1))
    yield gauge, "devices_outliers", "", help, outliers
    dropped = rows(func.coalesce(func.sum(devices.c.dropped), 0), where=devices.c.fleet == fleet)
    yield counter, "dropped_messages", "", "Messages of devices dropped above the rate limit.", dropped
    by_release = (row for row in counts(devices, devices.c.release) if row[0] > 0)
    yield gauge, "devices_on_release", "release", "Devices by the release they run.", by_release

    yield gauge, "runs", "state", "Runs by state.", counts(runs, runs.c.state)
    of_runs = (runs.c.fleet == fleet) & (runs.c.run == rounds.c.run)
    lasted = rows(func.count(), func.coalesce(func.sum(rounds.c.seconds), 0.0), where=of_runs)
    yield summary, "round_duration_seconds", "", "Duration of rounds.", lasted
    verdicts = verdict_counts.c
    decided = rows(verdicts.outcome, verdicts.rounds, verdicts.named, where=verdicts.fleet == fleet)
    by_outcome = dict.fromkeys(get_args(Outcome), 0) | {outcome: number for outcome, number, _ in decided}
    help = "Rounds that a panel of devices compared, by what became of them."
    yield counter, "gate_rounds", "outcome", help, by_outcome.items()
    help = "Devices named because a round was worse with their updates."
    yield counter, "gate_named_devices", "", help, [(sum(number for *_, number in decided),)]
    newest = select(runs.c.run, rounds.c.round, rounds.c.metrics, rounds.c.clients).where(of_runs)
    last = connection.execute(newest.order_by(rounds.c.ended_at.desc()).limit(RECENT)).all()
    at = [(run, round) for run, round, *_ in last[:1]]
    yield gauge, "round", "run", "The last completed round.", at
    of_run = [(metrics, clients) for run, _, metrics, clients in last if run == last[0].run and metrics]
    evaluated = of_run[0] if of_run else ({}, {})
    means, clients = ({name: found for name, found in one.items() if "acc" in name} for one in evaluated)
    known = [(name, value) for name, value in means.items() if value is not None]
    help = "Mean over clients in the last evaluated round, 0 to 1."
    yield gauge, "accuracy", "metric", help, known
    yield (
        gauge,
        "accuracy_clients",
        "metric",
        "Clients behind each mean of edge_fl_accuracy.",
        clients.items(),
    )
    requested = counts(requests, requests.c.mode, requests.c.state)
    yield gauge, "requests", "mode state", "Requests to devices by state.", requested

    report, mine = reports.c, reports.c.fleet == fleet
    yield counter, "reports", "kind", "Accepted reports.", counts(reports, report.kind)
    ((down, up),) = rows(func.sum(report.bytes_down), func.sum(report.bytes_up), where=mine)
    moved = [("down", down or 0), ("up", up or 0)]
    yield counter, "bytes", "direction", "Bytes transferred, as reported by devices.", moved
    took = rows(func.count(), func.sum(report.seconds), where=mine, by=[report.kind])
    yield summary, "work_duration_seconds", "kind", "Time that devices worked per report.", took
    rejected = rows(
        rejection_counts.c.reason, rejection_counts.c.count, where=rejection_counts.c.fleet == fleet
    )
    yield counter, "rejected_reports", "reason", "Rejected reports by reason.", rejected

    highest = rows(func.coalesce(func.max(releases.c.release), 0), where=releases.c.fleet == fleet)
    yield gauge, "release", "", "The newest release.", highest
    by_state = dict.fromkeys(OPEN, 0) | dict(counts(rollouts, rollouts.c.state))
    yield gauge, "rollouts", "state", "Roll-outs by state.", by_state.items()
