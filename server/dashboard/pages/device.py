"""One device's own page: what it is, how its accuracy went, what it was asked and what it answered."""

from __future__ import annotations

from datetime import datetime

from edge_fl.metrics import by_labels
from server.dashboard.pages.parts import empty, facts, plot, table, word
from server.dashboard.queries.device import DevicePage, capability
from server.registry.records import ReportRecord
from server.report import svg
from server.report.formatting import NOTHING, clock, escape, number, seconds, share, since, size

DESCRIBED = {
    "machine": "Machine",
    "memory_mb": "Memory, MB",
    "disk_free_mb": "Disk free, MB",
    "python": "Python",
    "onnxruntime": "onnxruntime",
    "max_opset": "Largest opset",
    "agent": "Agent",
    "protocol": "Protocol",
}
"""What a device says that it is, and the heading of it."""


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
            "Last seen": since(record.seen_at, now),
        },
        big=True,
    )
    why = " ".join(filter(None, (record.why, record.quarantine)))
    said = f'<p class="alarm">{escape(why)}</p>' if why else ""
    rest = {heading: _described(able[name]) for name, heading in DESCRIBED.items() if able.get(name)}
    rest["Boot"] = escape(record.boot)
    rest["First seen, UTC"] = clock(record.first_seen_at)
    notes = "".join(f"<li>{escape(note)}</li>" for note in able.get("notes", ()))
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    spread = svg.columns(counts)
    return "".join(
        [
            said,
            f'<div class="sheet padded">{main}</div>',
            _history(page.reports),
            _cold_start(page.reports),
            f"<h2>Samples by class</h2><div class='sheet padded'>{spread}</div>" if spread else "",
            f"<h2>What it is</h2><div class='sheet padded'>{facts(rest)}{notes}</div>",
            _reports(page),
            _requests(page),
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
    return "<h2>Accuracy, % by report</h2>" + plot(
        series, height=180, label="Accuracy by report", step="report"
    )


def _cold_start(reports: tuple[ReportRecord, ...]) -> str:
    """How many labels each kind of head needs here; a device whose head is `auto` measures it at every fit."""
    newest: dict[str, dict[int, float]] = next(
        filter(None, (by_labels(report.metrics) for report in reports)), {}
    )
    series = [
        svg.Series(kind, [svg.Point(labels, value) for labels, value in sorted(curve.items())])
        for kind, curve in newest.items()
    ]
    if not series:
        return ""
    return "<h2>Held-out accuracy, % by labels per class</h2>" + plot(
        series, height=180, label="Accuracy by labels per class", step="labels per class"
    )


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
    numbers = ("Round", "Release", "Before %", "After %", "Took", "Bytes")
    names = ("Received, UTC", "Kind", "Run", *numbers, "Error")
    return "<h2>Reports</h2>" + (
        table(names, rows, numbers, named=False) if page.reports else '<p class="quiet">None yet.</p>'
    )


def _requests(page: DevicePage) -> str:
    if not page.requests:
        return ""
    rows = (
        (
            clock(run_id.asked_at),
            escape(run_id.mode),
            escape(run_id.run),
            number(run_id.round),
            word(run_id.state),
            escape(run_id.reason),
        )
        for run_id in page.requests
    )
    return "<h2>Tasks</h2>" + table(
        ("Asked, UTC", "Mode", "Run", "Round", "State", "Reason"), rows, {"Round"}, named=False
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
    return "<h2>Refused</h2>" + table(
        ("Received, UTC", "Run", "Round", "Why", "Detail"), rows, {"Round"}, named=False
    )


def _described(value: str | int) -> str:
    return number(value) if isinstance(value, int) else escape(value)
