"""One device: its description, its accuracy over time, its requests, reports and rejections."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

from edge_fl.metrics import by_labels
from server.dashboard.live import Address, Board
from server.dashboard.pages import charts
from server.dashboard.pages.charts import Chart, Curve
from server.dashboard.pages.parts import columns, empty, facts, heading, word
from server.dashboard.queries import device
from server.dashboard.queries.device import DevicePage, capability
from server.report.formatting import clock, escape, number, seconds, share, since, size

DESCRIPTION = {
    "machine": "Machine",
    "memory_mb": "Memory, MB",
    "disk_free_mb": "Disk free, MB",
    "python": "Python",
    "onnxruntime": "onnxruntime",
    "max_opset": "Largest opset",
    "agent": "Agent",
    "protocol": "Protocol",
}
"""Field of a capability -> its heading."""
REPORTS = columns(
    ("Received, UTC", "Kind", "Run", "Round", "Release", "Before %", "After %", "Took", "Bytes", "Error"),
    {"Round", "Release", "Before %", "After %", "Took", "Bytes"},
)
REQUESTS = columns(("Requested, UTC", "Mode", "Run", "Round", "State", "Reason"), {"Round"})
REJECTIONS = columns(("Received, UTC", "Run", "Round", "Reason", "Detail"), {"Round"})


def title(page: DevicePage | None, id: str) -> str:
    """The device's name and status."""
    if page is None:
        return heading(id) + empty("Unknown device", f"No device {id!r} has connected to this fleet yet.")
    blocked = page.record.barred
    return heading(id, word(page.record.status) + (f'<span class="tag bad">{blocked}</span>' if blocked else ""))


def summary(page: DevicePage | None, now: datetime) -> str:
    """Why the device needs attention, and its main figures."""
    if page is None:
        return ""
    record, able = page.record, capability(page.record)
    newest = next((report for report in page.reports if report.after is not None), None)
    why = escape(" ".join(filter(None, (record.why, record.quarantine))))
    return (f'<p class="alarm">{why}</p>' if why else "") + facts(
        {
            "Accuracy after, %": share(newest.after if newest else None),
            "Before, %": share(newest.before if newest else None),
            "Release": number(record.release or None),
            "Tier": escape(able.get("tier", "")),
            "Head": escape(able.get("head", "")),
            "Samples": number(able.get("samples", 0)),
            "Last seen": since(record.seen_at, now),
        },
        big=True,
    )


def description(page: DevicePage | None) -> str:
    """The hardware and software of the device, and its notes."""
    if page is None:
        return ""
    able = capability(page.record)
    values = {name: able[key] for key, name in DESCRIPTION.items() if able.get(key)}
    shown = {name: number(v) if isinstance(v, int) else escape(v) for name, v in values.items()}
    shown |= {"Boot": escape(page.record.boot), "First seen, UTC": clock(page.record.first_seen_at)}
    notes = "".join(f"<li>{escape(note)}</li>" for note in able.get("notes", ()))
    return f"<h2>Description</h2>{facts(shown)}" + (f'<ul class="notes">{notes}</ul>' if notes else "")


def history(page: DevicePage | None) -> Chart | None:
    """Accuracy by report, from two reports on."""
    reports = [r for r in reversed(page.reports if page else ()) if r.after is not None or r.before is not None]
    numbered = dict(enumerate(reports, 1))
    after = {place: report.after for place, report in numbered.items() if report.after is not None}
    before = {place: report.before for place, report in numbered.items() if report.before is not None}
    curves = [Curve("after", after), Curve("before", before, dashed=True)]
    return charts.lines(curves, "report", 200) if len(reports) > 1 else None


def cold_start(page: DevicePage | None) -> Chart | None:
    """Accuracy by labels per class for each kind of head, as a device whose head is `auto` measured it last."""
    measured = (by_labels(report.metrics) for report in (page.reports if page else ()))
    newest: dict[str, dict[int, float]] = next(filter(None, measured), {})
    curves = [Curve(kind, dict(sorted(curve.items()))) for kind, curve in newest.items()]
    return charts.lines(curves, "labels per class", 200)


def reports(page: DevicePage | None) -> Iterator[tuple[str, ...]]:
    """The cells of each report."""
    for report in page.reports if page else ():
        yield (
            clock(report.received_at),
            escape(report.kind),
            escape(report.run),
            number(report.round),
            number(report.release or None),
            share(report.before),
            share(report.after),
            seconds(report.seconds),
            size(report.bytes_down + report.bytes_up),
            f'<span class="text-bad">{escape(report.error)}</span>',
        )


def requests(page: DevicePage | None) -> Iterator[tuple[str, ...]]:
    """The cells of each request."""
    for one in page.requests if page else ():
        texts = (escape(one.mode), escape(one.run), number(one.round), word(one.state), escape(one.reason))
        yield clock(one.asked_at), *texts


def rejections(page: DevicePage | None) -> Iterator[tuple[str, ...]]:
    """The cells of each rejected report."""
    for one in page.rejections if page else ():
        texts = (escape(one.run), number(one.round), escape(one.reason), escape(one.detail))
        yield clock(one.received_at), *texts


def build(board: Board, address: Address) -> None:
    """Add the page's parts."""
    id = address["id"]
    find = partial(device.page, board.context.db, board.context.fleet, id)
    board.html(find, lambda page: title(page, id))
    board.html(find, lambda page: summary(page, datetime.now(UTC)))
    board.chart(find, history, "Accuracy, % by report")
    board.chart(find, cold_start, "Held-out accuracy, % by labels per class")
    counts = "samples_per_class"
    board.chart(
        find,
        lambda page: charts.columns(capability(page.record).get(counts, ())) if page else None,
        "Samples by class",
    )
    board.html(find, description)
    board.table(find, REPORTS, reports, "Reports")
    board.table(find, REQUESTS, requests, "Requests")
    board.table(find, REJECTIONS, rejections, "Rejected reports")
