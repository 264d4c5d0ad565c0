"""A run by round: accuracies as a chart and a table, clients that did not respond, rejected reports.

Counts and means come from the registry, std and bottom decile from the run's folder where the dashboard can read it. A device that was
requested several times in a round counts once: by its success, else by its newest request.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import isfinite, nan
from pathlib import Path

from msgspec import Struct
from sqlalchemy import case, func, select

from edge_fl import metrics
from edge_fl.console.units import NOTHING, clock, escape, mean, number, positive, seconds, share, size
from edge_fl.metrics import PERSONAL_AFTER, PERSONAL_BEFORE, Summary, summarise_reports
from edge_fl_console.dashboard import charts
from edge_fl_console.dashboard.charts import Chart, ChartCurve
from edge_fl_console.dashboard.live import Address, PageBoard, update
from edge_fl_console.dashboard.parts import (
    PageColumn,
    button,
    cut_text,
    empty,
    facts,
    heading,
    run_link,
    word,
)
from edge_fl_server.registry import Database, fleets, runs
from edge_fl_server.registry.registered_devices import of_fleet
from edge_fl_server.registry.runs import RunTraffic
from edge_fl_server.registry.tables import RoundRecord, RunRecord, devices, rejections, requests
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.summaries import too_few

NEWEST_RUNS = 100
PERSONAL = (PERSONAL_AFTER, PERSONAL_BEFORE)
UNMEASURED = Summary(nan, nan, nan, nan, 0)
DROPPED = case(
    ((requests.c.state == "failed") & (requests.c.reason != ""), requests.c.reason),
    (requests.c.state.in_(("failed", "timed_out", "cancelled")), requests.c.state),
    else_="",
)
"""Why a request had no success; "" for all others."""


class RoundRow(Struct, frozen=True):
    """One round. `dropped` and `rejected` count by reason; `summaries` is empty if the run's folder cannot be read.

    `down` and `up` are the bytes that devices received and sent for it.
    """

    record: RoundRecord
    summaries: Mapping[str, Summary] = {}
    dropped: dict[str, int] = {}
    rejected: dict[str, int] = {}
    down: int = 0
    up: int = 0

    def mean(self, *names: str) -> Summary | None:
        """The first of these metrics that was measured; of one that only the registry has, its mean and number of clients."""
        for name in names:
            if name in self.summaries:
                return self.summaries[name]
            if (value := self.record.metrics.get(name)) is not None:
                return Summary(value, nan, nan, nan, self.record.clients.get(name, 0))
        return None

    @property
    def spread(self) -> Summary:
        """The summary of the personal accuracy; NaN where it is not known."""
        return self.mean(*PERSONAL) or UNMEASURED


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
    traffic: RunTraffic = RunTraffic()

    def newest(self, *names: str) -> tuple[Summary, str] | None:
        """The first of these metrics in the final personalisation or else the newest round that measured one, and which it was."""
        for name in names:
            if name in self.final:
                return self.final[name], "final"
        for row in reversed(self.rounds):
            if mean := row.mean(*names):
                return mean, f"round {row.record.round}"
        return None


def read(db: Database, fleet: str, run: str = "") -> RunPage | None:
    """A run of the fleet, by default the newest; None if there is none."""
    known = runs.listed(db, fleet)[:NEWEST_RUNS]
    record = next((one for one in known if run in ("", one.run)), None)
    if record is None:
        return None
    lines = round_metrics.latest(round_metrics.lines(Path(record.folder) / round_metrics.FILE))
    summaries = {line.round: line.metrics for line in lines if not line.final}
    dropped, current = _requested(db, record.run)
    rejected, traffic = _rejected(db, record.run), runs.traffic(db, record)
    rows = tuple(
        RoundRow(
            one,
            summaries.get(one.round, {}),
            dropped.get(one.round, {}),
            rejected.get(one.round, {}),
            *traffic.rounds.get(one.round, (0, 0)),
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
        traffic=traffic,
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


CURVES = {
    metrics.PERSONAL_BEFORE: "personal, before final personalisation",
    metrics.PERSONAL_AFTER: "personal, after",
    metrics.PERSONAL_LOCAL: "personal, before aggregation",
    metrics.GLOBAL_TEST: "global",
    metrics.LOCAL_ONLY: "local only",
}


def _mean(found: Summary | None) -> str:
    return mean(found.mean, found.clients) if found else NOTHING


def _personal(row: RoundRow) -> str:
    """The mean of full devices; a round without evaluation has none of any metric."""
    if not row.record.metrics and not row.summaries:
        return '<span class="quiet">not evaluated</span>'
    return _mean(row.mean(*PERSONAL))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {cut_text(key.replace('_', ' '))}" for key, count in sorted(counts.items()))


def _dropped(row: RoundRow) -> str:
    return _counts(row.dropped) or positive(max(row.record.selected - row.record.responded, 0))


ROUNDS = (
    PageColumn("Round", "record.round", number),
    PageColumn("Personal mean %", "personal", share, cell=lambda row: _personal(row)),
    PageColumn("Std", "spread.std", share, minor=True),
    PageColumn("Bottom decile %", "spread.bottom_decile", share, minor=True),
    PageColumn("Global mean %", "global", share, cell=lambda row: _mean(row.mean(metrics.GLOBAL_TEST))),
    PageColumn("Local only, mean %", "local", share, cell=lambda row: _mean(row.mean(metrics.LOCAL_ONLY))),
    PageColumn("Selected", "record.selected", number),
    PageColumn("Responded", "record.responded", number),
    PageColumn("Dropped out", "dropped", cell=_dropped),
    PageColumn("Rejected", "rejected", lambda counts: _counts(counts) or NOTHING),
    PageColumn("Took", "record.seconds", seconds),
    PageColumn("Down", "down", size),
    PageColumn("Up", "up", size),
    PageColumn("Ended, UTC", "record.ended_at", lambda moment: clock(moment)[11:]),
)
RUNS = (
    PageColumn("Run", "run", run_link),
    PageColumn("State", "state", word),
    PageColumn("Method", "method"),
    PageColumn("Dataset", "dataset"),
    PageColumn("Source", "source"),
    PageColumn("Rounds", "rounds", number),
    PageColumn("Started, UTC", "created_at", clock),
    PageColumn("Reason", "reason"),
)


def absent(id: str) -> str:
    """The empty state: of a fleet without runs, or of an unknown run."""
    if id:
        return heading(id) + empty("Unknown run", f"This fleet has no run {id!r}. The menu's Runs lists all.")
    text = "Runs on this fleet appear here as soon as they start."
    return heading("Runs") + empty("No run yet", text, "edge-fl server run demo")


def title(page: RunPage) -> str:
    """The run's name, state and stop button."""
    record, rest = page.run, word(page.run.state)
    if record.state == "running" and record.desired == "stopped":
        rest += f'<span class="text-warn">{"stops after the current round" if page.online else "stop requested"}</span>'
    elif record.state == "running":
        stop = button("stop", record.run, "Stop after this round", "danger")
        rest += f'<span class="actions">{stop}</span>'
    if record.state == "running" and not page.online:
        rest += '<span class="text-bad">its server is offline</span>'
    reason = f'<p class="quiet">{escape(record.reason)}</p>' if record.reason else ""
    return heading(record.run, rest) + reason


def summary(page: RunPage) -> str:
    """The run's main figures."""
    record = page.run
    total = sum(page.current.values())
    done = (
        f'{total - page.current.get("queued", 0):,} of {total:,}<div class="quiet">in the current round</div>'
    )
    shown = facts(
        {
            "Method": escape(record.method),
            "Dataset": escape(record.dataset),
            "Source": escape(record.source),
            "Rounds": f"{page.rounds[-1].record.round if page.rounds else 0} of {record.rounds}",
            "Personal, full devices, mean %": _headline(page, *PERSONAL),
            **(
                {"Global, mean %": shared}
                if (shared := _headline(page, metrics.GLOBAL_TEST)) != NOTHING
                else {}
            ),
            **({"Head-only devices, mean %": _heads(page)} if metrics.PERSONAL_AFTER in page.heads else {}),
            "Traffic of devices": _traffic(page.traffic),
            **({"Devices done": done} if total and record.state == "running" else {}),
        }
    )
    if page.rounds:
        return shown
    soon = "Rounds appear here as soon as their cohort has responded."
    waiting = soon if record.state == "running" else "The run ended before its first round was complete."
    return shown + empty("No completed round", waiting)


def curves(page: RunPage) -> Chart | None:
    """Accuracy by round, with bands of one std where the run's folder can be read; rounds that few clients measured stand apart."""
    drawn = []
    for metric, name in CURVES.items():
        found = {row.record.round: one for row in page.rounds if (one := row.mean(metric))}
        found = {round: one for round, one in found.items() if isfinite(one.mean)}
        std = {round: one.std for round, one in found.items() if isfinite(one.std)}
        clients = {round: one.clients for round, one in found.items()}
        values = {round: one.mean for round, one in found.items()}
        drawn.append(ChartCurve(name, values, std, metric == metrics.LOCAL_ONLY, clients, too_few(clients)))
    return charts.lines(drawn, "round", 300)


def visible(page: RunPage) -> list[str]:
    """Names of the columns to show: of other accuracies only those that were measured."""
    names = {"global": metrics.GLOBAL_TEST, "local": metrics.LOCAL_ONLY}
    absent = {name for name, metric in names.items() if not any(row.mean(metric) for row in page.rounds)}
    if not any(row.summaries for row in page.rounds):
        absent |= {"spread.std", "spread.bottom_decile"}
    return [column.name for column in ROUNDS if column.name not in absent]


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    find = partial(read, board.context.db, board.context.fleet, address.get("id", ""))
    board.html(find, title, absent(address.get("id", "")))
    board.html(find, summary)
    caption = "Mean accuracy, % by round; bands are one std over the n clients. Hollow: fewer than half as many clients as in other rounds"
    board.chart(find, curves, caption)
    rounds = board.table(find, ROUNDS, lambda page: reversed(page.rounds), "Rounds")

    def show(page: RunPage | None) -> None:
        if page:
            update(rounds, "visible-columns", visible(page))

    board.part(find, show)
    board.table(find, RUNS, lambda page: page.others, "All runs")


def _heads(page: RunPage) -> str:
    found = page.heads[metrics.PERSONAL_AFTER]
    fleet = page.heads.get(metrics.FLEET)
    rest = f"; fleet's head {share(fleet.mean)} (n = {number(fleet.clients)})" if fleet else ""
    return f'{share(found.mean)}<div class="quiet">n = {number(found.clients)}, newest release{rest}</div>'


def _traffic(found: RunTraffic) -> str:
    """Both directions, and what is included."""
    what = "payloads of releases, models, updates and reports"
    return f'{size(found.down)} down, {size(found.up)} up<div class="quiet">{what}</div>'


def _headline(page: RunPage, *names: str) -> str:
    """The newest of these metrics, with its number of clients and its round."""
    if (found := page.newest(*names)) is None:
        return NOTHING
    newest, when = found
    n = number(newest.clients) if newest.clients else "?"
    return f'{share(newest.mean)}<div class="quiet">n = {n}, {when}</div>'
