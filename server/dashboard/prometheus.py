"""The registry as Prometheus metrics: read when they are asked for, so that nothing has to be counted twice or kept in step.

Counters are sums over the registry, which survives a restart of the server; so do they.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from sqlalchemy import Connection, func, select

from server.registry import Database
from server.registry.tables import devices, rejections, releases, reports, requests, rollouts, rounds, runs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN = ("running", "paused")


class FleetCollector:
    """What prometheus-client collects from: one fleet of a registry."""

    def __init__(self, db: Database, fleet: str) -> None:
        self._db, self._fleet = db, fleet

    def collect(self) -> Iterator[Metric]:
        """Every metric, read in one transaction."""
        with self._db.reading() as connection:
            yield from (*_devices(connection, self._fleet), *_runs(connection, self._fleet))
            yield from (*_reports(connection, self._fleet), *_releases(connection, self._fleet))


def text(db: Database, fleet: str) -> bytes:
    """The metrics of a fleet in Prometheus' text format. Raises RunError when the registry does not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetCollector(db, fleet))
    return generate_latest(registry)


def _devices(connection: Connection, fleet: str) -> Iterable[Metric]:
    tier = func.coalesce(devices.c.capability["tier"].as_string(), "unknown")
    mine = devices.c.fleet == fleet
    found = GaugeMetricFamily(
        "edge_fl_devices", "Devices by what they said last.", labels=("fleet", "status", "tier")
    )
    wanted = select(devices.c.status, tier, func.count()).where(mine).group_by(devices.c.status, tier)
    for status, of_tier, count in connection.execute(wanted):
        found.add_metric((fleet, status, of_tier), count)
    barred = GaugeMetricFamily(
        "edge_fl_devices_barred", "Devices whose reports do not count.", labels=("fleet", "why")
    )
    for why, which in (("quarantined", devices.c.quarantine != ""), ("revoked", devices.c.revoked)):
        barred.add_metric(
            (fleet, why), connection.execute(select(func.count()).where(mine, which)).scalar_one()
        )
    running = GaugeMetricFamily(
        "edge_fl_devices_on_release", "Devices by the release that they run.", labels=("fleet", "release")
    )
    on = select(devices.c.release, func.count()).where(mine, devices.c.release > 0)
    for release, count in connection.execute(on.group_by(devices.c.release)):
        running.add_metric((fleet, str(release)), count)
    return found, barred, running


def _runs(connection: Connection, fleet: str) -> Iterable[Metric]:
    by_state = GaugeMetricFamily("edge_fl_runs", "Runs by how they stand.", labels=("fleet", "state"))
    for state, count in connection.execute(
        select(runs.c.state, func.count()).where(runs.c.fleet == fleet).group_by(runs.c.state)
    ):
        by_state.add_metric((fleet, state), count)
    joined = rounds.join(runs, runs.c.run == rounds.c.run)
    sums = select(func.count(), func.coalesce(func.sum(rounds.c.seconds), 0.0)).select_from(joined)
    count, total = connection.execute(sums.where(runs.c.fleet == fleet)).one()
    lasted = SummaryMetricFamily(
        "edge_fl_round_duration_seconds", "How long rounds took, and how many there were.", labels=("fleet",)
    )
    lasted.add_metric((fleet,), count_value=count, sum_value=total)
    newest = (
        select(rounds.c.round, rounds.c.metrics, runs.c.run)
        .select_from(joined)
        .where(runs.c.fleet == fleet)
        .order_by(rounds.c.ended_at.desc())
        .limit(1)
    )
    at = GaugeMetricFamily("edge_fl_round", "The newest round that is over.", labels=("fleet", "run"))
    accuracy = GaugeMetricFamily(
        "edge_fl_accuracy", "Mean over clients after the newest round, 0 to 1.", labels=("fleet", "metric")
    )
    for round, found, run in connection.execute(newest):
        at.add_metric((fleet, run), round)
        for name, value in found.items():
            if value is not None and "acc" in name:
                accuracy.add_metric((fleet, name), value)
    asked = GaugeMetricFamily(
        "edge_fl_tasks", "What devices were asked, by what became of it.", labels=("fleet", "mode", "state")
    )
    wanted = select(requests.c.mode, requests.c.state, func.count()).where(requests.c.fleet == fleet)
    for mode, state, count in connection.execute(wanted.group_by(requests.c.mode, requests.c.state)):
        asked.add_metric((fleet, mode, state), count)
    return by_state, lasted, at, accuracy, asked


def _reports(connection: Connection, fleet: str) -> Iterable[Metric]:
    heard = CounterMetricFamily("edge_fl_reports", "Reports that count.", labels=("fleet", "kind"))
    sent = CounterMetricFamily("edge_fl_bytes", "What devices say they moved.", labels=("fleet", "direction"))
    took = SummaryMetricFamily(
        "edge_fl_work_duration_seconds", "How long devices worked for a report.", labels=("fleet", "kind")
    )
    down = up = 0
    sums = [func.sum(column) for column in (reports.c.bytes_down, reports.c.bytes_up, reports.c.seconds)]
    wanted = select(reports.c.kind, func.count(), *sums).where(reports.c.fleet == fleet)
    for kind, count, fetched, given, seconds in connection.execute(wanted.group_by(reports.c.kind)):
        heard.add_metric((fleet, kind), count)
        took.add_metric((fleet, kind), count_value=count, sum_value=seconds)
        down, up = down + fetched, up + given
    sent.add_metric((fleet, "down"), down)
    sent.add_metric((fleet, "up"), up)
    refused = CounterMetricFamily(
        "edge_fl_rejected_reports", "Reports that do not count, by reason.", labels=("fleet", "reason")
    )
    reasons = select(rejections.c.reason, func.count()).where(rejections.c.fleet == fleet)
    for reason, count in connection.execute(reasons.group_by(rejections.c.reason)):
        refused.add_metric((fleet, reason), count)
    return heard, sent, took, refused


def _releases(connection: Connection, fleet: str) -> Iterable[Metric]:
    newest = GaugeMetricFamily("edge_fl_release", "The newest release.", labels=("fleet",))
    highest = connection.execute(select(func.max(releases.c.release)).where(releases.c.fleet == fleet))
    newest.add_metric((fleet,), highest.scalar_one() or 0)
    by_state = GaugeMetricFamily(
        "edge_fl_rollouts", "Roll-outs by how they stand.", labels=("fleet", "state")
    )
    found = dict.fromkeys(OPEN, 0)
    wanted = select(rollouts.c.state, func.count()).where(rollouts.c.fleet == fleet)
    found |= dict(connection.execute(wanted.group_by(rollouts.c.state)).all())
    for state, count in found.items():
        by_state.add_metric((fleet, state), count)
    return newest, by_state
