"""A run by round: accuracies as a chart and a table, clients that did not respond, rejected reports."""

from collections.abc import Mapping
from functools import partial
from math import isfinite

from edge_fl import metrics
from edge_fl.console.formatting import (
    NOTHING,
    clock,
    escape,
    mean,
    number,
    positive,
    seconds,
    share,
    size,
)
from edge_fl_console.dashboard import charts
from edge_fl_console.dashboard.charts import Chart, ChartCurve
from edge_fl_console.dashboard.live import Address, PageBoard, update
from edge_fl_console.dashboard.parts import PageColumn, button, empty, facts, heading, run_link, word
from edge_fl_console.dashboard.queries import run
from edge_fl_console.dashboard.queries.run import PERSONAL, MetricMean, RoundRow, RunPage
from edge_fl_server.runs.summaries import too_few

CURVES = {
    metrics.PERSONAL_BEFORE: "personal, before final personalisation",
    metrics.PERSONAL_AFTER: "personal, after",
    metrics.PERSONAL_LOCAL: "personal, before aggregation",
    metrics.GLOBAL_TEST: "global",
    metrics.LOCAL_ONLY: "local only",
}


def _mean(found: MetricMean | None) -> str:
    return mean(found.value, found.clients) if found else NOTHING


def _personal(row: RoundRow) -> str:
    """The mean of full devices; a round without evaluation has none of any metric."""
    if not row.record.metrics and not row.summaries:
        return '<span class="quiet">not evaluated</span>'
    return _mean(row.mean(*PERSONAL))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {escape(key.replace('_', ' '))}" for key, count in sorted(counts.items()))


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
    PageColumn("Bytes", "bytes", size),
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
            "Bytes": size(sum(row.bytes for row in page.rounds)),
            **({"Devices done": done} if total and record.state == "running" else {}),
        },
        big=True,
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
        found = {round: one for round, one in found.items() if isfinite(one.value)}
        std = {row.record.round: row.summaries[metric].std for row in page.rounds if metric in row.summaries}
        clients = {round: one.clients for round, one in found.items()}
        values = {round: one.value for round, one in found.items()}
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
    find = partial(run.page, board.context.db, board.context.fleet, address.get("id", ""))
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
    return f'{share(found.mean)}<div class="quiet">n = {number(found.clients)}, newest release</div>'


def _headline(page: RunPage, *names: str) -> str:
    """The newest of these metrics, with its number of clients and its round."""
    if (found := page.newest(*names)) is None:
        return NOTHING
    value, clients, when = found[0].value, found[0].clients, found[1]
    return f'{share(value)}<div class="quiet">n = {number(clients) if clients else "?"}, {when}</div>'
