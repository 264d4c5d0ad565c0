"""A run, round by round: accuracies by their honest names as curves and as a table, who dropped out, what was refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from edge_fl import metrics
from edge_fl.metrics import Summary
from server.dashboard.pages.parts import empty, facts, plot, table, word
from server.dashboard.queries.run import RoundRow, RunPage
from server.report import svg
from server.report.formatting import NOTHING, clock, escape, number, seconds, share, size

CURVES: tuple[tuple[str, str, bool], ...] = (
    ("personal, before the closing step", metrics.PERSONAL_BEFORE, False),
    ("personal, after", metrics.PERSONAL_AFTER, False),
    ("global", metrics.GLOBAL_TEST, False),
    ("local only", metrics.LOCAL_ONLY, True),
)
PERSONAL = (metrics.PERSONAL_AFTER, metrics.PERSONAL_BEFORE)


def title(page: RunPage | None) -> str:
    """Which run, and how it stands."""
    if page is None:
        return '<div class="head"><h1>Runs</h1></div>'
    run = page.run
    asked = run.state == "running" and run.desired == "stopped"
    of = escape(run.run)
    stop = f'<button class="danger" data-key="stop" data-act="stop:{of}">Stop after this round</button>'
    stop = f'<span class="actions">{stop}</span>' if run.state == "running" and not asked else ""
    note = '<span class="text-warn">asked to stop after the round under way</span>' if asked else ""
    return f'<div class="head"><h1>{escape(run.run)}</h1>{word(run.state)}{note}{stop}</div>'


def body(page: RunPage | None) -> str:
    """Everything about a run."""
    if page is None:
        return empty(
            "No run yet", "Runs against this fleet appear here as they begin.", "edge-fl server run demo"
        )
    run, last = page.run, page.rounds[-1] if page.rounds else None
    tiles = facts(
        {
            "Method": escape(run.method),
            "Dataset": escape(run.dataset),
            "Source": escape(run.source),
            "Rounds": f"{last.record.round if last else 0} of {run.rounds}",
            "Personal, %": _headline(page, PERSONAL),
            "Global, %": _headline(page, (metrics.GLOBAL_TEST,)),
            "Bytes": size(sum(row.bytes for row in page.rounds)),
            "Under way": _under_way(page.under_way) if run.state == "running" else NOTHING,
        },
        big=True,
    )
    reason = f'<p class="quiet">{escape(run.reason)}</p>' if run.reason else ""
    return f'{reason}<div class="sheet padded">{tiles}</div>{_curves(page.rounds)}{_rounds(page.rounds)}{_runs(page)}'


def _curves(rounds: Sequence[RoundRow]) -> str:
    series = []
    for name, metric, dashed in CURVES:
        points = []
        for row in rounds:
            summary = row.summaries.get(metric)
            mean = summary.mean if summary else row.record.metrics.get(metric)
            if mean is None or not isfinite(mean):
                continue
            low, high = (mean - summary.std, mean + summary.std) if summary else (None, None)
            points.append(svg.Point(row.record.round, mean, low, high))
        series.append(svg.Series(name, points, dashed))
    drawn = plot(series, label="Accuracy by round")
    return f"<h2>Accuracy, % by round; bands are one std over clients</h2>{drawn}" if drawn else ""


def _rounds(rounds: Sequence[RoundRow]) -> str:
    if not rounds:
        return empty("No round is over", "The first one shows up here when its cohort has answered.")
    measured = ("Personal mean %", "Std", "Worst tenth %", "Global %", "Local only %")
    counted = ("Asked", "Answered", "Dropped out", "Refused", "Took", "Bytes")
    numbers = {"Round", *measured, *counted} - {"Dropped out", "Refused"}
    rows = (_round(row) for row in reversed(rounds))
    return "<h2>Rounds</h2>" + table(("Round", *measured, *counted, "Ended, UTC"), rows, numbers)


def _round(row: RoundRow) -> tuple[str, ...]:
    record = row.record
    personal = next((row.summaries[name] for name in PERSONAL if name in row.summaries), None)
    return (
        number(record.round),
        _mean(row, PERSONAL),
        share(personal.std if personal else None),
        share(personal.bottom_decile if personal else None),
        _mean(row, (metrics.GLOBAL_TEST,)),
        _mean(row, (metrics.LOCAL_ONLY,)),
        number(record.selected),
        number(record.responded),
        _counted(row.ended_badly) or number(max(record.selected - record.responded, 0) or None),
        _counted(row.refused) or NOTHING,
        seconds(record.seconds),
        size(row.bytes),
        clock(record.ended_at)[11:],
    )


def _runs(page: RunPage) -> str:
    rows = (
        (
            f'<a href="/run/{escape(run.run)}" data-key="run-{escape(run.run)}">{escape(run.run)}</a>',
            word(run.state),
            escape(run.method),
            escape(run.dataset),
            escape(run.source),
            number(run.rounds),
            clock(run.created_at),
            escape(run.reason),
        )
        for run in page.others
    )
    return "<h2>All runs</h2>" + table(
        ("Run", "State", "Method", "Dataset", "Source", "Rounds", "Began, UTC", "Reason"), rows, {"Rounds"}
    )


def _headline(page: RunPage, names: Sequence[str]) -> str:
    """The first of the metrics that was measured by the closing step, or else in the newest round."""
    closed = next((page.closing[name] for name in names if name in page.closing), None)
    return share(closed.mean) if closed else _mean(page.rounds[-1] if page.rounds else None, names)


def _mean(row: RoundRow | None, names: Sequence[str]) -> str:
    """The first of the metrics that was measured."""
    if row is None:
        return NOTHING
    found: dict[str, Summary] = row.summaries
    for name in names:
        if name in found:
            return share(found[name].mean)
        if row.record.metrics.get(name) is not None:
            return share(row.record.metrics[name])
    return NOTHING


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count:,} {escape(reason.replace('_', ' '))}" for reason, count in sorted(found.items())
    )


def _under_way(found: Mapping[str, int]) -> str:
    asked = sum(found.values())
    return f"{asked - found.get('queued', 0):,} of {asked:,}" if asked else NOTHING
