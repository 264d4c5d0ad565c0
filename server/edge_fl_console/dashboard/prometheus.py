"""The registry as Prometheus metrics, read at each scrape; counters are sums over the registry, so they survive a restart of the server.

Accuracies are the means that the pages show, each with its number of devices in a metric of the same labels.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection, func, select

from edge_fl.metrics import ACCURACY, Summary, summarise_reports
from edge_fl_console import accuracy
from edge_fl_console.accuracy import HeadReports
from edge_fl_server.registry import Database, rollouts
from edge_fl_server.registry.registered_devices import STANDING, of_fleet
from edge_fl_server.registry.tables import (
    Subject,
    devices,
    rejection_counts,
    releases,
    reports,
    requests,
    rounds,
    runs,
    verdict_counts,
)
from edge_fl_server.registry.tables import rollouts as rolled_out
from edge_fl_server.training.records import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN = ("running", "paused")
RECENT = 100  # rounds, among which the last evaluated one is looked for
SUBJECTS: tuple[Subject, ...] = ("extractor", "agent")
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[SummaryMetricFamily]
Family = tuple[Kind, str, str, str, Iterable[Sequence[Any]]]
"""Kind, name, labels and help of a metric, and its samples: the labels' values, then its value, or count and sum of a summary."""


def text(db: Database, fleet: str) -> bytes:
    """The metrics of a fleet in Prometheus' text format. Raises RunError when the registry does not respond."""
    return generate_latest(FleetCollector(db, fleet))


class FleetCollector(Collector):
    """Collector of prometheus-client for one fleet of a registry."""

    def __init__(self, db: Database, fleet: str) -> None:
        self._db, self._fleet = db, fleet

    def collect(self) -> Iterator[Metric]:
        """Every metric; most are read in one transaction."""
        db, fleet = self._db, self._fleet
        served = {subject: rollouts.served_release(db, fleet, subject) for subject in SUBJECTS}
        by_release = accuracy.head_reports(db, fleet)
        with db.reading() as connection:
            for kind, name, labels, help, rows in (
                *_metrics(connection, fleet),
                *_of_releases(connection, fleet, served),
                *_accuracies(by_release),
            ):
                names = labels.split()
                family = kind(f"edge_fl_{name}", help, labels=("fleet", *names))
                for row in rows:
                    family.add_metric((fleet, *map(str, row[: len(names)])), *row[len(names) :])
                yield family


def _metrics(connection: Connection, fleet: str) -> Iterator[Family]:
    """The devices, runs, rounds and reports."""

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
    means, clients = ({name: found for name, found in one.items() if ACCURACY in name} for one in evaluated)
    final = _final(connection, last[0].run) if last else {}
    means |= {name: one.mean for name, one in final.items()}
    clients |= {name: one.clients for name, one in final.items()}
    known = [(name, value) for name, value in means.items() if value is not None]
    help = "Mean over clients in the last evaluated round, or of the final personalisation, 0 to 1."
    yield gauge, "accuracy", "metric", help, known
    help = "Clients behind each mean of edge_fl_accuracy."
    yield gauge, "accuracy_clients", "metric", help, clients.items()
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


def _final(connection: Connection, run: str) -> dict[str, Summary]:
    """The accuracies of the final personalisation of a run, from the newest report of each full device."""
    of_run = (reports.c.run == run) & (reports.c.kind == "personal") & (reports.c.error == "")
    query = select(reports.c.device, reports.c.metrics).where(of_run).order_by(reports.c.received_at)
    found = {row.device: row.metrics for row in connection.execute(query)}
    summaries = summarise_reports(list(found.values()))
    return {name: one for name, one in summaries.items() if ACCURACY in name}


def _of_releases(connection: Connection, fleet: str, served: Mapping[Subject, int]) -> Iterator[Family]:
    """The releases in service and the newest ones, and the roll-outs, of the extractor and of the agent's software."""
    numbers = select(rolled_out.c.subject, func.max(rolled_out.c.release)).where(rolled_out.c.fleet == fleet)
    newest = {row[0]: row[1] for row in connection.execute(numbers.group_by(rolled_out.c.subject))}
    published = select(func.coalesce(func.max(releases.c.release), 0)).where(releases.c.fleet == fleet)
    newest["extractor"] = connection.execute(published).scalar_one()
    states = [(name, "in_service", served[name]) for name in SUBJECTS]
    states += [(name, "newest", newest.get(name, 0)) for name in SUBJECTS]
    help = "The release in service and the newest one, 0 for none."
    yield GaugeMetricFamily, "release", "subject state", help, states
    count = select(rolled_out.c.subject, rolled_out.c.state, func.count()).where(rolled_out.c.fleet == fleet)
    by_state = dict.fromkeys(((subject, state) for subject in SUBJECTS for state in OPEN), 0)
    for subject, state, number in connection.execute(
        count.group_by(rolled_out.c.subject, rolled_out.c.state)
    ):
        by_state[subject, state] = number
    shown = [(*names, number) for names, number in by_state.items()]
    yield GaugeMetricFamily, "rollouts", "subject state", "Roll-outs by state.", shown


def _accuracies(by_release: Mapping[int, HeadReports]) -> Iterator[Family]:
    """The means of head-only devices by release."""
    found = [
        (release, model, mean, n)
        for release, one in by_release.items()
        for model, mean, n in (
            ("served", one.after, one.measured),
            ("fleets_head", one.fleet, one.fleet_measured),
            *(
                [("before", one.gain.before, one.gain.n), ("after", one.gain.after, one.gain.n)]
                if one.gain
                else ()
            ),
        )
        if n
    ]
    help = (
        "Mean accuracy of head-only devices, 0 to 1: served and fleets_head of those that serve the release now;"
        " before and after of those that measured the model served before on the same samples."
    )
    labels = "release model"
    yield GaugeMetricFamily, "release_accuracy", labels, help, [(*names, mean) for *names, mean, _ in found]
    help = "Devices behind each mean of edge_fl_release_accuracy."
    counts = [(*names, n) for *names, _, n in found]
    yield GaugeMetricFamily, "release_accuracy_devices", labels, help, counts
