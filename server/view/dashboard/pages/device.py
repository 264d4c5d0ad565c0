"""One device's own page: what it is, how its accuracy went, what it was asked and what it answered."""

from __future__ import annotations

from datetime import datetime

from server.registry.records import ReportRecord
from server.view import svg
from server.view.dashboard.pages.parts import empty, facts, table, word
from server.view.dashboard.queries.device import DevicePage, capability
from server.view.words import NOTHING, ago, clock, escape, number, seconds, share, size

SHOWN_APART = ("tier", "samples", "samples_per_class", "head", "notes")


def title(page: DevicePage | None, device: str) -> str:
    """Its name and how it is."""
    if page is None:
        return f'<div class="head"><h1>{escape(device)}</h1></div>'
    record = page.record
    barred = f'<span class="tag bad">{record.barred}</span>' if record.barred else ""
    return f'<div class="head"><h1>{escape(device)}</h1>{word(record.status)}{barred}</div>'


def body(page: DevicePage | None, device: str, now: datetime) -> str:
    """All that is known of it."""
    if page is None:
        return empty("Never heard of", f"No device {device!r} has ever spoken to this fleet's server.")
    record, able = page.record, capability(page.record)
    newest = next((report for report in page.reports if report.after is not None), None)
    counts = tuple(able.get("samples_per_class", ()))
    main = facts(
        {
            "Accuracy after, %": share(newest.after if newest else None),
            "Before, %": share(newest.before if newest else None),
            "Release": number(record.release) if record.release else NOTHING,
            "Tier": escape(able.get("tier", "")),
            "Head": escape(able.get("head", "")),
            "Samples": number(able.get("samples", 0)),
            "Seen": ago(record.seen_at, now),
        },
        big=True,
    )
    why = " ".join(filter(None, (record.why, record.quarantine)))
    said = f'<p class="alarm">{escape(why)}</p>' if why else ""
    rest = {
        escape(name.replace("_", " ")): escape(value)
        for name, value in able.items()
        if value not in ("", None, [], 0) and name not in SHOWN_APART
    }
    rest["boot"] = escape(record.boot)
    rest["first seen"] = clock(record.first_seen_at)
    spread = svg.bars(counts, width=min(24 * len(counts), 640), height=56) if counts else ""
    return "".join(
        [
            said,
            f'<div class="sheet padded">{main}</div>',
            _history(page.reports),
            f"<h2>Samples by class</h2><div class='sheet padded'>{spread}</div>" if spread else "",
            f"<h2>What it is</h2><div class='sheet padded'>{facts(rest)}</div>",
            _reports(page),
            _tasks(page),
            _refused(page),
        ]
    )


def _history(reports: tuple[ReportRecord, ...]) -> str:
    found = [report for report in reversed(reports) if report.after is not None or report.before is not None]
    series = [
        svg.Series(
            name,
            [
                svg.Point(place, value, marks={"report": report.id})
                for place, report in enumerate(found, 1)
                if (value := getattr(report, field)) is not None
            ],
            dashed,
        )
        for name, field, dashed in (("after", "after", False), ("before", "before", True))
    ]
    if len(found) < 2:
        return ""
    drawn = svg.curves(series, height=180, label="Accuracy by report", step="report")
    return f"<h2>Accuracy, % by report</h2><div class='sheet padded'>{svg.legend(series)}{drawn}</div>"


def _reports(page: DevicePage) -> str:
    rows = (
        (
            clock(report.received_at),
            escape(report.kind),
            escape(report.run),
            number(report.round),
            number(report.release) if report.release else NOTHING,
            share(report.before),
            share(report.after),
            seconds(report.seconds),
            size(report.bytes_down + report.bytes_up),
            f'<span class="text-bad">{escape(report.error)}</span>' if report.error else "",
        )
        for report in page.reports
    )
    names = ("Received", "Kind", "Run", "Round", "Release", "Before %", "After %", "Took", "Bytes", "Error")
    return "<h2>Reports</h2>" + (
        table(names, rows, frozenset((3, 4, 5, 6, 7, 8)))
        if page.reports
        else '<p class="quiet">None yet.</p>'
    )


def _tasks(page: DevicePage) -> str:
    if not page.tasks:
        return ""
    rows = (
        (
            clock(task.asked_at),
            escape(task.mode),
            escape(task.run),
            number(task.round),
            word(task.state),
            escape(task.reason),
        )
        for task in page.tasks
    )
    return "<h2>Tasks</h2>" + table(
        ("Asked", "Mode", "Run", "Round", "State", "Reason"), rows, frozenset((3,))
    )


def _refused(page: DevicePage) -> str:
    if not page.rejections:
        return ""
    rows = (
        (
            clock(found.received_at),
            escape(found.run),
            number(found.round),
            escape(found.reason),
            escape(found.detail),
        )
        for found in page.rejections
    )
    return "<h2>Refused</h2>" + table(("Received", "Run", "Round", "Reason", "Detail"), rows, frozenset((2,)))
