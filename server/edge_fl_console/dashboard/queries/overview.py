"""The state of a fleet at a glance: what needs attention, what personalisation gains, what changed last."""

from collections.abc import Collection, Mapping
from math import isfinite
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from msgspec import Struct
from sqlalchemy import func, select

from edge_fl import metrics
from edge_fl_console.alerts import stored
from edge_fl_console.dashboard.queries import log, releases, standing
from edge_fl_console.dashboard.queries.log import Event
from edge_fl_console.dashboard.queries.releases import Change, HeadReports
from edge_fl_console.dashboard.queries.run import head_only_devices
from edge_fl_server.registry import Database, fleets, rollouts, runs
from edge_fl_server.registry.devices import of_fleet
from edge_fl_server.registry.fleets import Presence
from edge_fl_server.registry.tables import (
    AlertRecord,
    RolloutRecord,
    RoundRecord,
    RunRecord,
    devices,
    reports,
)
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.summaries import Paired, is_enough, paired

EVENTS = 8
RUNS = 5  # newest runs, among which the last evaluated one is looked for
BASELINES = (metrics.LOCAL_ONLY, metrics.GLOBAL_TEST, metrics.PERSONAL_BEFORE)
MEASURING = ("evaluation", "personal")
Measured = Mapping[str, Mapping[str, float]]
"""Device -> metric -> value."""
EMPTY: Measured = MappingProxyType({})


class FleetGain(Struct, frozen=True):
    """The personal accuracy of devices compared with a baseline on the same ones; means before and after.

    `simulated`: the baseline was not measured by the devices, but simulated on their data.
    """

    baseline: str
    before: float
    after: float
    found: Paired
    simulated: bool = False


class FullDevices(Struct, frozen=True):
    """The mean personal accuracy of `n` full devices in the newest evaluated round of a run, and its gains over baselines.

    `heads` is the gain of head-only devices in the run's final personalisation, where the run has a local-only baseline for them.
    """

    run: str
    round: int
    personal: float | None
    n: int
    gains: tuple[FleetGain, ...]
    heads: FleetGain | None = None


class Overview(Struct, frozen=True):
    """A fleet of `total` devices. `health` counts those that need attention by group, `whys` those in alert by reason; `raised` are the
    active alerts of rules.

    `served` is the release in service (0: none), `change` that of accuracy by it; `heads` are the reports on it. `run` is the newest
    run, `reached` its newest round, `rollout` the one under way. `fleets` are other fleets of this registry, if this one has no device.
    """

    server: Presence
    total: int
    by_status: dict[str, int]
    health: dict[str, int]
    whys: dict[str, int]
    raised: tuple[AlertRecord, ...]
    served: int
    change: Change
    head_devices: int
    running: int
    heads: HeadReports
    full: FullDevices | None
    run: RunRecord | None
    reached: RoundRecord | None
    rollout: RolloutRecord | None
    agents: RolloutRecord | None
    events: tuple[Event, ...]
    fleets: tuple[str, ...] = ()


def page(db: Database, fleet: str) -> Overview:
    """The overview of a fleet. Raises RunError when the registry does not respond."""
    by_status, alerted = standing.by_status(db, fleet), of_fleet(fleet) & standing.GROUPS["alert"]
    whys = select(devices.c.why, func.count()).where(alerted).group_by(devices.c.why)
    with db.reading() as connection:
        by_why = {row[0]: row[1] for row in connection.execute(whys)}
        others = () if by_status else tuple(connection.execute(select(devices.c.fleet).distinct()).scalars())
    served, known = rollouts.served_release(db, fleet), runs.listed(db, fleet)[:RUNS]
    moving = standing.on_release(db, fleet, served)
    rounds = runs.rounds_of(db, known[0].run) if known else []
    return Overview(
        server=fleets.presence(db, fleet),
        total=sum(by_status.values()),
        by_status=by_status,
        health=standing.needing_attention(db, fleet),
        whys=by_why,
        raised=tuple(stored.active(db, fleet)),
        served=served,
        change=releases.change(db, fleet, served),
        head_devices=moving.running + moving.others,
        running=moving.running,
        heads=releases.head_reports(db, fleet).get(served, HeadReports()),
        full=next((found for run in known if (found := _full_devices(db, run))), None),
        run=known[0] if known else None,
        reached=rounds[-1] if rounds else None,
        rollout=rollouts.current(db, fleet),
        agents=next(iter(rollouts.listed(db, fleet, "agent")), None),
        events=log.newest(db, fleet, without=("round",), most=EVENTS),
        fleets=others,
    )


def full_devices(
    run: str, round: int, measured: Measured, final: Measured = EMPTY, heads: Collection[str] = ()
) -> FullDevices:
    """The personal accuracy of these devices, compared with each baseline that was measured on the devices that have both.

    `final` is the final line of the run, of all devices, of which `heads` are head-only; its local-only accuracies are the baseline of
    devices that measured none.
    """
    after = _of(measured, metrics.PERSONAL_AFTER)
    enough = after and is_enough(len(after), len(_of(measured, metrics.PERSONAL_BEFORE)))
    best = metrics.PERSONAL_AFTER if enough else metrics.PERSONAL_BEFORE
    personal = _of(measured, best)
    others = {baseline: _of(measured, baseline) for baseline in BASELINES if baseline != best}
    found = [_gain(baseline, other, personal) for baseline, other in others.items()]
    local = _of(final, metrics.LOCAL_ONLY)
    if not others[metrics.LOCAL_ONLY]:
        found.insert(0, _gain(metrics.LOCAL_ONLY, local, personal, simulated=True))
    of_heads = _of({name: one for name, one in final.items() if name in heads}, metrics.PERSONAL_AFTER)
    gain_of_heads = _gain(metrics.LOCAL_ONLY, local, of_heads, simulated=True)
    accuracy = fmean(personal.values()) if personal else None
    gains = tuple(gain for gain in found if gain)
    return FullDevices(run, round, accuracy, len(personal), gains, gain_of_heads)


def _gain(
    baseline: str, other: Mapping[str, float], personal: Mapping[str, float], *, simulated: bool = False
) -> FleetGain | None:
    if (difference := paired(other, personal)) is None:
        return None
    both = other.keys() & personal.keys()
    before, after = (fmean(values[device] for device in both) for values in (other, personal))
    return FleetGain(baseline, before, after, difference, simulated)


def _of(measured: Measured, metric: str) -> dict[str, float]:
    """The finite values of a metric."""
    found = {device: values[metric] for device, values in measured.items() if metric in values}
    return {device: value for device, value in found.items() if isfinite(value)}


def _full_devices(db: Database, record: RunRecord) -> FullDevices | None:
    """The newest evaluated round of a run; None if no device has evaluated."""
    report, run = reports.c, record.run
    evaluated = (report.run == run) & report.kind.in_(MEASURING) & (report.error == "")
    newest = select(func.max(report.round)).where(evaluated)
    with db.reading() as connection:
        round = connection.execute(newest).scalar()
        if round is None:
            return None
        rows = select(report.device, report.metrics).where(evaluated, report.round == round)
        measured: dict[str, dict[str, float]] = {}
        for device, values in connection.execute(rows.order_by(report.received_at)):
            measured.setdefault(device, {}).update(values)
    ended = record.state != "running"  # only then the file has a final line
    lines = round_metrics.lines(Path(record.folder) / round_metrics.FILE) if ended else []
    final = next((line.clients for line in reversed(lines) if line.final), EMPTY)
    return full_devices(run, round, measured, final, head_only_devices(db, record.fleet) if final else ())
