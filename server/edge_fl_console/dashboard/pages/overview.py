"""The overview: what needs attention, what personalisation gains, what changed last."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import isfinite
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from nicegui import ui
from sqlalchemy import func, select

from edge_fl import metrics
from edge_fl.console.units import NOTHING, clock, counted, escape, few, number, share
from edge_fl_console import accuracy
from edge_fl_console.accuracy import Change, HeadReports
from edge_fl_console.alerts import rules, stored
from edge_fl_console.alerts.rules import AlertSettings, RulePlace
from edge_fl_console.dashboard import charts, standing
from edge_fl_console.dashboard.charts import Chart
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.pages import fleet as fleets
from edge_fl_console.dashboard.pages import log
from edge_fl_console.dashboard.pages.log import Event
from edge_fl_console.dashboard.pages.run import head_only_devices
from edge_fl_console.dashboard.parts import (
    TOGGLE,
    empty,
    facts,
    gain,
    heading,
    meaning,
    means,
    run_link,
    word,
)
from edge_fl_server.registry import Database, history, registered_devices, rollouts, runs
from edge_fl_server.registry.fleets import Presence, presence
from edge_fl_server.registry.tables import (
    AlertRecord,
    HistoryRecord,
    RolloutRecord,
    RoundRecord,
    RunRecord,
    devices,
    reports,
)
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.summaries import Paired, is_enough, paired

DAY = "24 h"
PERIODS = {"hour": 3600, DAY: 86_400, "7 days": 7 * 86_400, "year": 365 * 86_400}
"""Period of the charts -> seconds."""
GAP_STEPS, GAP_S = (
    3,
    120,
)  # times the usual distance of points, and the least time, from which no server ran in between
EVENTS = 8
MOST_REASONS = 3  # different ones of a rule
RUNS = 5  # newest runs, among which the last evaluated one is looked for
MEASURING = ("evaluation", "personal")
Point = tuple[int, float | None, str]
Measured = Mapping[str, Mapping[str, float]]
"""Device -> metric -> value."""
EMPTY: Measured = MappingProxyType({})


class FleetGain(Struct, frozen=True):
    """The personal accuracy of devices compared with a baseline on the same ones.

    `simulated`: the baseline was not measured by the devices, but simulated on their data.
    """

    baseline: str
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


class Past(Struct, frozen=True):
    """The history of a period; `known`: there is any, in this period or before."""

    known: bool
    rows: tuple[HistoryRecord, ...]


class Holding(Struct, frozen=True):
    """The devices for which a rule of this kind holds, and their reasons as text."""

    rule: str
    kind: str
    devices: int
    reasons: str


class Overview(Struct, frozen=True):
    """A fleet of `total` devices, of which `attention` need attention: `health` says by which rules. `raised` are the active alerts that
    are not about a device.

    `served` is the release in service (0: none), `change` that of accuracy by it; `heads` are the reports on it. `run` is the newest
    run, `reached` its newest round, `rollout` the one under way. `fleets` are other fleets of this registry, if this one has no device.
    """

    server: Presence
    total: int
    by_status: dict[str, int]
    attention: int
    health: tuple[Holding, ...]
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


def read(db: Database, fleet: str, settings: AlertSettings = rules.DEFAULT) -> Overview:
    """The overview of a fleet. Raises RunError when the registry does not respond."""
    by_status = standing.by_status(db, fleet)
    holding = rules.conditions(RulePlace(db, fleet), settings, of_devices=True)
    active = stored.active(db, fleet)
    of_devices = set(registered_devices.names(db, fleet)) if active else set()
    others = [] if by_status else db.rows(select(devices.c.fleet).distinct())
    served, known = rollouts.served_release(db, fleet), runs.listed(db, fleet)[:RUNS]
    moving = standing.on_release(db, fleet, served)
    rounds = runs.rounds_of(db, known[0].run) if known else []
    return Overview(
        server=presence(db, fleet),
        total=sum(by_status.values()),
        by_status=by_status,
        attention=len(rules.by_device(holding)),
        health=tuple(
            Holding(name, settings.rules[name].kind, len(one), reasons(one))
            for name, one in holding.items()
            if one
        ),
        raised=tuple(alert for alert in active if alert.subject not in of_devices),
        served=served,
        change=accuracy.change(db, fleet, served),
        head_devices=moving["running"] + moving["others"],
        running=moving["running"],
        heads=accuracy.head_reports(db, fleet).get(served, HeadReports()),
        full=next((found for run in known if (found := _full_devices(db, run))), None),
        run=known[0] if known else None,
        reached=rounds[-1] if rounds else None,
        rollout=rollouts.current(db, fleet),
        agents=next(iter(rollouts.listed(db, fleet, "agent")), None),
        events=log.newest(db, fleet, without=("round",), most=EVENTS),
        fleets=tuple(row.fleet for row in others),
    )


def reasons(holding: Mapping[str, str]) -> str:
    """Why a rule holds, with names or numbers of devices: "pi-07: 90 MB free", or "3 × ..." for equal reasons."""
    counts = Counter(holding.values())
    if len(counts) > MOST_REASONS:
        first = next(iter(holding.items()))
        return f"{few(holding)}; {first[0]}: {first[1]}"
    names = {text: device for device, text in holding.items()}
    return "; ".join(
        f"{many:,} × {text}" if many > 1 else f"{names[text]}: {text}" for text, many in counts.most_common()
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
    found = [_fleet_gain(baseline, other, personal) for baseline, other in others.items()]
    local = _of(final, metrics.LOCAL_ONLY)
    if not others[metrics.LOCAL_ONLY]:
        found.insert(0, _fleet_gain(metrics.LOCAL_ONLY, local, personal, simulated=True))
    of_heads = _of({name: one for name, one in final.items() if name in heads}, metrics.PERSONAL_AFTER)
    gain_of_heads = _fleet_gain(metrics.LOCAL_ONLY, local, of_heads, simulated=True)
    accuracy = fmean(personal.values()) if personal else None
    gains = tuple(gain for gain in found if gain)
    return FullDevices(run, round, accuracy, len(personal), gains, gain_of_heads)


def _fleet_gain(
    baseline: str, other: Mapping[str, float], personal: Mapping[str, float], *, simulated: bool = False
) -> FleetGain | None:
    found = paired(other, personal)
    return FleetGain(baseline, found, simulated) if found else None


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


BASELINES = {
    metrics.LOCAL_ONLY: "training on the device's own data alone",
    metrics.GLOBAL_TEST: "the shared model",
    metrics.PERSONAL_BEFORE: "the same models before the final personalisation",
}
HEALTH = {
    "quarantine": ("bad", "in quarantine, whose reports do not count"),
    "failing": ("warn", "in alert"),
    "lost": ("bad", "lost: power, network or memory"),
    "silent": ("bad", "without a connection for long"),
    "disk": ("warn", "with a full disk, or little space"),
    "certificate": ("warn", "whose certificate ends soon"),
    "restarts": ("warn", "whose agent starts again and again"),
    "drift": ("warn", "with samples that have changed since the head was fitted"),
    "promise": ("warn", "whose prediction sets miss the right class more often than promised"),
    "outlier": ("warn", "with an update that differs strongly from the others'"),
}
"""Kind of rule that watches devices -> its colour, and what is wrong with them."""
OTHERWISE_SHOWN = frozenset({"rollout"})
"""Rules of alerts whose conditions have items of their own, next to those of devices."""


class Item(Struct, frozen=True):
    """Something that needs attention: its colour, a sentence, the page about it, and a further line as markup."""

    tone: str
    text: str
    link: str
    detail: str = ""


def items(page: Overview, server_up: str = "edge-fl server up", *, elsewhere: bool = False) -> Iterator[Item]:
    """Everything that needs attention, the most urgent first; `elsewhere`: the files of its releases are not on this machine."""
    if not page.server.online:
        what = (
            f"No server is online since {clock(page.server.since)[:16]} UTC"
            if page.server.since
            else "No server seen yet"
        )
        detail = f"Devices keep their reports, and nothing is rolled out. Start one: <code>{escape(server_up)}</code>"
        if elsewhere and page.served:
            detail += (
                ", on the machine with the releases; a demo that has ended has none and cannot be continued"
            )
        waiting = page.rollout or (page.run and page.run.state == "running")
        yield Item("bad" if waiting else "warn", what, "/log", detail)
    if page.run and page.run.state == "failed":
        yield Item("bad", f"Run {page.run.run} failed", f"/run/{page.run.run}", escape(page.run.reason))
    if (rollout := page.rollout) and "paused" in (rollout.state, rollout.desired):
        text = f"The roll-out of release {rollout.release} is paused"
        yield Item("warn", text, "/releases", escape(rollout.reason))
    if (rollout := page.agents) and rollout.state in ("paused", "aborted"):
        text = f"The roll-out of agent release {rollout.release} is {rollout.state}"
        yield Item("warn", text, "/releases", escape(rollout.reason))
    for one in page.health:
        tone, what = HEALTH[one.kind]
        named = "" if one.rule == one.kind else f" (rule {one.rule})"
        yield Item(
            tone,
            f"{counted(one.devices, 'device')} {what}{named}",
            f"/fleet?only={one.rule}",
            escape(one.reasons),
        )
    if (change := page.change).found and change.found.high < 0 and not change.rolled_back:
        text = f"Release {page.served} is worse than release {change.other}"
        yield Item("warn", text, "/releases", f"{gain(change.found)} on the same devices, beyond chance")
    raised = sorted(page.raised, key=lambda alert: alert.rule)
    for rule, same in groupby(raised, lambda alert: alert.rule):
        if rule not in OTHERWISE_SHOWN:
            yield _alert(rule, list(same))


def _alert(rule: str, found: list[AlertRecord]) -> Item:
    """The active alerts of one rule."""
    subject = found[0].subject
    if "release " in subject:
        link = "/releases"
    elif subject in ("server", "fleet"):
        link = "/log"
    else:
        link = "/fleet"
    of = subject if len(found) == 1 else f"{subject} and {len(found) - 1:,} more"
    return Item("warn", f"Alert {rule}: {of}", link, escape(found[0].text))


def health(page: Overview, server_up: str = "edge-fl server up", *, elsewhere: bool = False) -> str:
    """The list of items that need attention, as links."""
    found = list(items(page, server_up, elsewhere=elsewhere))
    if not found:
        text = f"Nothing needs attention: {counted(page.total, 'device')}, and a server is online."
        return f'<h2>Health</h2><div class="sheet padded"><p class="word good">{text}</p></div>'
    rows = "".join(
        f'<li><a class="word {item.tone}" href="{escape(item.link)}">{escape(item.text)}</a>'
        + (f'<div class="quiet">{item.detail}</div>' if item.detail else "")
        + "</li>"
        for item in found
    )
    return f'<h2>Health</h2><ul class="sheet padded items">{rows}</ul>'


def gained(page: Overview) -> str:
    """What personalisation gains over baselines, each on the same devices with its interval."""
    rows = [_gain("Full devices", one, page.full) for one in page.full.gains] if page.full else []
    if page.full and not rows:
        personal = f'{share(page.full.personal)} % <span class="quiet">(n = {number(page.full.n)})</span>'
        rows.append(
            f"<li><p>Full devices: {personal}, mean accuracy of their personal models.</p>"
            '<p class="quiet">Gain not measured: this method has no shared model to compare them with.</p></li>'
        )
    if page.full and page.full.heads:
        rows.append(_gain("Head-only devices", page.full.heads, page.full))
    local = page.full and (
        page.full.heads or any(one.baseline == metrics.LOCAL_ONLY for one in page.full.gains)
    )
    if not rows:
        rows.append(
            "<li>Not measured yet: it takes devices that measured their personal model and a baseline on the same samples.</li>"
        )
    if not local:
        rows.append(
            '<li class="quiet">Local-only baseline: not measured on devices; in a simulation of your data'
            " <code>edge-fl compare</code> measures it.</li>"
        )
    return f'<h2>Personalisation gain</h2><ul class="sheet padded items">{"".join(rows)}</ul>'


def _gain(who: str, one: FleetGain, full: FullDevices) -> str:
    what = f"{who}: personal models compared with {BASELINES[one.baseline]}{' (simulated)' * one.simulated}"
    return _compared(one.found, what, f"; run {run_link(full.run)}, round {full.round}")


def _compared(found: Paired, what: str, rest: str) -> str:
    """A difference as an item of a list: `what` is compared, and the `rest` of the line with both means."""
    return (
        f'<li><p class="big">{gain(found)}</p><p>{what}, same devices: {meaning(found)}.</p>'
        f'<p class="quiet">{means(found)}, mean accuracy in %{rest}</p></li>'
    )


def changed(page: Overview) -> str:
    """How the release in service compares with the one before, or with the one that a roll-back left; "" without a release."""
    change, found = page.change, page.change.found
    if not page.served:
        return ""
    back = f"rolled back from release {change.other} to {page.served}" if change.rolled_back else ""
    other = f"release {change.other}" if change.other else "the model served before"
    if found is None:
        text = f"{back[:1].upper()}{back[1:]}. " if back else ""
        rows = f"<li>{text}Not measured yet: it takes devices with an accuracy on release {page.served} and on {other}.</li>"
    else:
        what = f"Head-only devices: release {page.served} compared with {other}"
        rows = _compared(found, what, f"; {back}, last accuracy on each" if back else "")
    return f'<h2>Change by the release in service</h2><ul class="sheet padded items">{rows}</ul>'


def summary(page: Overview, fleet: str) -> str:
    """The main figures, or the empty state."""
    if not page.total and page.run is None:
        others = f" This registry has devices of: {', '.join(page.fleets)} (--fleet)." if page.fleets else ""
        text = f"Fleet {fleet} has no device and no run.{others} Start with one of these:"
        return empty("Nothing here yet", text, fleets.COMMANDS)
    states = ", ".join(f"{count:,} {escape(status)}" for status, count in page.by_status.items())
    return facts(
        {
            "Devices": f'<a href="/fleet">{number(page.total)}</a><div class="quiet">{states}</div>',
            "Need attention": f'<a href="/fleet?only=attention">{number(page.attention)}</a>',
            "Release in service": _release(page),
            "Newest run": _run(page),
        }
    )


def _release(page: Overview) -> str:
    if not page.served:
        return NOTHING
    runs = f"{page.running:,} of {page.head_devices:,} head-only devices run it"
    return f'<a href="/releases">{page.served}</a><div class="quiet">{runs}</div>'


def _run(page: Overview) -> str:
    if page.run is None:
        return NOTHING
    reached = f"round {page.reached.round if page.reached else 0} of {page.run.rounds}"
    return f'{run_link(page.run.run)}<div class="quiet">{word(page.run.state)}, {reached}</div>'


def accuracy_chart(rows: Sequence[HistoryRecord]) -> Chart | None:
    """Mean accuracy over time; the names have the newest n."""
    names = {
        "served": "heads in service",
        "fleets_head": "fleet's head",
        "full": "full devices",
    }
    curves = []
    for field, name in names.items():
        found = [(row, getattr(row, field), getattr(row, f"{field}_n")) for row in rows]
        if n := next((n for _, _, n in reversed(found) if n), 0):
            points = [
                (row.at_s, None if value is None else round(100 * value, 1), _point(name, value, of, row))
                for row, value, of in found
            ]
            curves.append(charts.TimeCurve(f"{name}, n = {n:,}", _with_gaps(points), field == "fleets_head"))
    return charts.times(curves, "mean accuracy, %")


def _point(name: str, value: float | None, n: int, row: HistoryRecord) -> str:
    on = f", release {row.release}" if row.release and not name.startswith("full") else ""
    return f"{name}: {share(value)} % (n = {n:,}{on})"


def online_chart(rows: Sequence[HistoryRecord]) -> Chart | None:
    """The connected devices over time, and all of the fleet."""
    online = [(row.at_s, float(row.online), f"online: {row.online:,} of {row.devices:,}") for row in rows]
    every = [(row.at_s, float(row.devices), f"devices of the fleet: {row.devices:,}") for row in rows]
    curves = [
        charts.TimeCurve("online", _with_gaps(online), steps=True),
        charts.TimeCurve("devices of the fleet", _with_gaps(every), dashed=True, steps=True),
    ]
    return charts.times(curves, "number of devices", least=0)


def _with_gaps(points: Iterable[Point]) -> list[Point]:
    """With an empty point in every time without a server."""
    found: list[Point] = []
    now_s = int(time.time())
    for point in points:
        if found:
            last_s = found[-1][0]
            if point[0] - last_s > max(GAP_STEPS * history.step_s(now_s - last_s), GAP_S):
                found.append((last_s + 1, None, ""))
        found.append(point)
    return found


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    period = address.get("period", "")
    period = period if period in PERIODS else DAY
    context = board.context

    def find() -> Overview:
        return read(context.db, context.fleet, context.alerts)

    server_up = context.command("server up")
    elsewhere = context.kept() is None
    ui.html(heading("Overview"), sanitize=False)
    board.html(find, lambda page: summary(page, context.fleet))
    with ui.element("div").classes("halves"):
        board.html(
            find, lambda page: health(page, server_up, elsewhere=elsewhere) if page.total or page.run else ""
        )
        board.html(find, lambda page: gained(page) + changed(page) if page.total or page.run else "")

    def past() -> Past:
        now_s = int(time.time())
        rows = history.since(context.db, context.fleet, now_s - PERIODS[period])
        return Past(bool(rows or history.since(context.db, context.fleet, 0)), tuple(rows))

    async def choose(event: Any) -> None:
        nonlocal period
        period = event.value
        ui.navigate.history.replace(f"/?period={period}" if period != DAY else "/")
        await board.refresh()

    with ui.element("section") as section:
        ui.html("<h2>Over time</h2>", sanitize=False)
        with ui.element("div").classes("bar"):
            ui.toggle({name: f"last {name}" for name in PERIODS}, value=period, on_change=choose).props(
                TOGGLE
            )
    section.set_visibility(False)
    board.part(past, lambda found: section.set_visibility(found.known))
    with ui.element("div").classes("halves"):
        board.chart(past, lambda found: accuracy_chart(found.rows), "Mean accuracy")
        board.chart(past, lambda found: online_chart(found.rows), "Devices online")
    board.table(find, log.COLUMNS, lambda page: page.events, "Recent changes")
