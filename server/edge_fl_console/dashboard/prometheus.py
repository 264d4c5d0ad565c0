"""The registry as Prometheus metrics, read at each scrape; counters are sums over the registry, so they survive a restart of the server."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection, func, select

from edge_fl_server.registry import Database
from edge_fl_server.registry.devices import STANDING, of_fleet
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


class FleetCollector(Collector):
    """Collector of prometheus-client for one fleet of a registry."""

    def __init__(self, db: Database, fleet: str) -> None:
        self._db, self._fleet = db, fleet

    def collect(self) -> Iterator[Metric]:
        """Every metric, read in one transaction."""
        with self._db.reading() as connection:
            for part in (_devices, _runs, _reports, _releases):
                yield from part(connection, self._fleet)


def text(db: Database, fleet: str) -> bytes:
    """The metrics of a fleet in Prometheus' text format. Raises RunError when the registry does not respond."""
    return generate_latest(FleetCollector(db, fleet))


def _family(
    kind: Kind, name: str, help: str, fleet: str, labels: Sequence[str], rows: Iterable[Any]
) -> Metric:
    """A metric with a sample per row: the values of its labels, then its value, or count and sum of a summary."""
    family = kind(f"edge_fl_{name}", help, labels=("fleet", *labels))
    for row in rows:
        family.add_metric((fleet, *map(str, row[: len(labels)])), *row[len(labels) :])
    return family


def _counts(connection: Connection, table: Any, fleet: str, *columns: Any) -> Iterable[Any]:
    """The number of rows of a fleet by these columns, without removed devices."""
    mine = of_fleet(fleet) if table is devices else table.c.fleet == fleet
    query = select(*columns, func.count()).where(mine)
    return connection.execute(query.group_by(*columns)).all()


def _devices(connection: Connection, fleet: str) -> Iterable[Metric]:
    tier = func.coalesce(devices.c.capability["tier"].as_string(), "unknown")
    by_status = _counts(connection, devices, fleet, devices.c.status, tier)
    yield _family(GaugeMetricFamily, "devices", "Devices by status.", fleet, ("status", "tier"), by_status)
    by_standing = dict(_counts(connection, devices, fleet, STANDING))
    blocked = [(why, by_standing.get(why, 0)) for why in ("quarantined", "revoked")]
    help = "Devices whose reports are rejected."
    yield _family(GaugeMetricFamily, "devices_blocked", help, fleet, ("why",), blocked)
    outliers = connection.execute(
        select(func.count()).where(of_fleet(fleet), devices.c.outlier_score >= 1)
    ).all()
    help = "Devices whose newest update was an outlier, with a score of at least 1."
    yield _family(GaugeMetricFamily, "devices_outliers", help, fleet, (), outliers)
    dropped = connection.execute(
        select(func.coalesce(func.sum(devices.c.dropped), 0)).where(devices.c.fleet == fleet)
    ).all()
    help = "Messages of devices dropped above the rate limit."
    yield _family(CounterMetricFamily, "dropped_messages", help, fleet, (), dropped)
    by_release = (row for row in _counts(connection, devices, fleet, devices.c.release) if row[0] > 0)
    help = "Devices by the release they run."
    yield _family(GaugeMetricFamily, "devices_on_release", help, fleet, ("release",), by_release)


def _runs(connection: Connection, fleet: str) -> Iterable[Metric]:
    by_state = _counts(connection, runs, fleet, runs.c.state)
    yield _family(GaugeMetricFamily, "runs", "Runs by state.", fleet, ("state",), by_state)
    joined = rounds.join(runs, runs.c.run == rounds.c.run)
    mine = runs.c.fleet == fleet
    sums = select(func.count(), func.coalesce(func.sum(rounds.c.seconds), 0.0)).select_from(joined)
    lasted = connection.execute(sums.where(mine)).all()
    help = "Duration of rounds."
    yield _family(SummaryMetricFamily, "round_duration_seconds", help, fleet, (), lasted)
    counts = verdict_counts.c
    decided = connection.execute(
        select(counts.outcome, counts.rounds, counts.named).where(counts.fleet == fleet)
    ).all()
    by_outcome = dict.fromkeys(get_args(Outcome), 0) | {outcome: number for outcome, number, _ in decided}
    help = "Rounds that a panel of devices compared, by what became of them."
    yield _family(CounterMetricFamily, "gate_rounds", help, fleet, ("outcome",), by_outcome.items())
    named = [(sum(number for *_, number in decided),)]
    help = "Devices named because a round was worse with their updates."
    yield _family(CounterMetricFamily, "gate_named_devices", help, fleet, (), named)
    newest = select(runs.c.run, rounds.c.round, rounds.c.metrics, rounds.c.clients).select_from(joined)
    last = connection.execute(newest.where(mine).order_by(rounds.c.ended_at.desc()).limit(RECENT)).all()
    at = [(run, round) for run, round, *_ in last[:1]]
    yield _family(GaugeMetricFamily, "round", "The last completed round.", fleet, ("run",), at)
    of_run = [(metrics, clients) for run, _, metrics, clients in last if run == last[0].run and metrics]
    evaluated = of_run[0] if of_run else ({}, {})
    means, clients = ({name: found for name, found in one.items() if "acc" in name} for one in evaluated)
    help = "Mean over clients in the last evaluated round, 0 to 1."
    known = [(name, value) for name, value in means.items() if value is not None]
    yield _family(GaugeMetricFamily, "accuracy", help, fleet, ("metric",), known)
    help = "Clients behind each mean of edge_fl_accuracy."
    yield _family(GaugeMetricFamily, "accuracy_clients", help, fleet, ("metric",), clients.items())
    requested = _counts(connection, requests, fleet, requests.c.mode, requests.c.state)
    help = "Requests to devices by state."
    yield _family(GaugeMetricFamily, "requests", help, fleet, ("mode", "state"), requested)


def _reports(connection: Connection, fleet: str) -> Iterable[Metric]:
    mine = reports.c.fleet == fleet
    by_kind = _counts(connection, reports, fleet, reports.c.kind)
    yield _family(CounterMetricFamily, "reports", "Accepted reports.", fleet, ("kind",), by_kind)
    moved = connection.execute(
        select(func.sum(reports.c.bytes_down), func.sum(reports.c.bytes_up)).where(mine)
    ).one()
    directions = [("down", moved[0] or 0), ("up", moved[1] or 0)]
    help = "Bytes transferred, as reported by devices."
    yield _family(CounterMetricFamily, "bytes", help, fleet, ("direction",), directions)
    work = select(reports.c.kind, func.count(), func.sum(reports.c.seconds)).where(mine)
    took = connection.execute(work.group_by(reports.c.kind)).all()
    help = "Time that devices worked per report."
    yield _family(SummaryMetricFamily, "work_duration_seconds", help, fleet, ("kind",), took)
    counts = rejection_counts.c
    rejected = connection.execute(select(counts.reason, counts.count).where(counts.fleet == fleet)).all()
    help = "Rejected reports by reason."
    yield _family(CounterMetricFamily, "rejected_reports", help, fleet, ("reason",), rejected)


def _releases(connection: Connection, fleet: str) -> Iterable[Metric]:
    highest = connection.execute(select(func.max(releases.c.release)).where(releases.c.fleet == fleet))
    newest = [(highest.scalar_one() or 0,)]
    yield _family(GaugeMetricFamily, "release", "The newest release.", fleet, (), newest)
    by_state = dict.fromkeys(OPEN, 0) | dict(_counts(connection, rollouts, fleet, rollouts.c.state))
    yield _family(GaugeMetricFamily, "rollouts", "Roll-outs by state.", fleet, ("state",), by_state.items())
