"""Releases: the devices that run each of them, the current roll-out with its stages, and the buttons that control it."""

from __future__ import annotations

from nicegui import ui

from edge_fl_server.dashboard.live import Address, Board
from edge_fl_server.dashboard.pages.parts import Column, button, empty, facts, heading, run_link, word
from edge_fl_server.dashboard.queries import releases
from edge_fl_server.dashboard.queries.releases import HeadReports, ReleaseRow, ReleasesPage
from edge_fl_server.registry.records import RolloutRecord
from edge_fl_server.report.formatting import NOTHING, clock, escape, mean, number, positive, share, size

END = (("abort", "Abort", "danger"), ("rollback", "Roll back", "danger"))
BUTTONS = {"running": (("pause", "Pause", ""), *END), "paused": (("resume", "Resume", "primary"), *END)}
"""State of a roll-out -> action, label and look of its buttons."""


ROLLOUTS = (
    Column("No.", "number", number),
    Column("Release", "release", number),
    Column("Replaces", "previous", positive),
    Column("State", "state", word),
    Column("Stage", "stage", cell=lambda record: f"{record.stage + 1} of {len(record.shares)}"),
    Column("Started, UTC", "created_at", clock),
    Column("Changed, UTC", "changed_at", clock),
    Column("Reason", "reason"),
)


def _running(row: ReleaseRow) -> str:
    return f'{row.running:,}<span class="meter"><i style="width:{100 * row.part:.1f}%"></i></span>'


def _accuracy(reports: HeadReports) -> str:
    return mean(reports.after, reports.measured)


def _paired(reports: HeadReports) -> str:
    """Means of the same devices with the model that they served before and with this release."""
    if not reports.paired:
        return NOTHING
    return f"{share(reports.paired_before)} → {mean(reports.paired_after, reports.paired)}"


def _start(row: ReleaseRow) -> str:
    label = "Roll back to this" if row.older else "Roll out"
    return button("start", row.record.release, label) if row.startable else ""


RELEASES = (
    Column("Release", "record.release", number),
    Column("Method", "record.method"),
    Column("Run", "record.run", run_link),
    Column("Round", "record.round", number),
    Column("Size", "record.bytes", size),
    Column("Running", "running", number, cell=_running),
    Column("Failed", "reports.failed", number),
    Column("Accuracy, mean %", "reports.after", share, cell=lambda row: _accuracy(row.reports)),
    Column(
        "Same devices, before and after, %",
        "reports.paired_after",
        share,
        cell=lambda row: _paired(row.reports),
    ),
    Column("Published, UTC", "record.published_at", clock),
    Column("", "start", cell=_start),
)


def current(page: ReleasesPage) -> str:
    """The current roll-out, or the result of the last one."""
    if not page.releases:
        command = "edge-fl server run demo"
        return empty("No release yet", "The first extractor is released after round 1.", command)
    record = page.current
    if record is None:
        last = page.rollouts[0] if page.rollouts else None
        result = (
            f"Last roll-out: release {last.release}, {word(last.state)}" if last else "There was none yet."
        )
        reason = f'<span class="quiet">: {escape(last.reason)}</span>' if last and last.reason else ""
        return f'<h2>No current roll-out</h2><p class="quiet">{result}{reason}</p>'
    shares = record.shares
    row = page.releases.get(record.release)
    reports = row.reports if row else HeadReports()
    bars = "".join(
        f'<i class="{_progress(place, record)}" style="flex:{max(upto - before, 0.08):.4f}"></i>'
        for place, (before, upto) in enumerate(zip([0.0, *shares], shares, strict=False))
    )
    waits = record.desired not in (record.state, "running")
    note = f'<span class="text-warn">{record.desired.replace("_", " ")} requested</span>' if waits else ""
    buttons = "".join(
        button(action, record.number, label, look)
        for action, label, look in (() if waits else BUTTONS.get(record.state, ()))
    )
    place = min(record.stage, len(shares) - 1)
    stage = f"stage {place + 1} of {len(shares)}, up to {shares[place]:.0%} of the fleet"
    shown = facts(
        {
            "Release": number(record.release),
            "Replaces": positive(record.previous),
            "Running": f"{row.running if row else 0:,} of {page.heads:,}",
            "Failed": number(reports.failed),
            "Accuracy, mean %": _accuracy(reports),
            "Same devices, before and after, %": _paired(reports),
        },
        big=True,
    )
    reason = f'<p class="quiet">{escape(record.reason)}</p>' if record.reason else ""
    rest = (
        f'{word(record.state)}{note}<span class="quiet">{stage}</span><span class="actions">{buttons}</span>'
    )
    return (
        f'<div id="rollout"><div class="head"><h2>Roll-out of release {record.release}</h2>{rest}</div>'
        f'{reason}<div class="steps" aria-hidden="true">{bars}</div>{shown}</div>'
    )


def build(board: Board, _: Address) -> None:
    """Add the page's parts."""

    def find() -> ReleasesPage:
        return releases.page(board.context.db, board.context.fleet, board.context.kept())

    ui.html(heading("Releases"), sanitize=False)
    board.html(find, current)
    board.table(find, RELEASES, lambda page: page.releases.values(), "Releases").classes("named")
    board.table(find, ROLLOUTS, lambda page: page.rollouts, "Roll-outs").classes("named")


def _progress(place: int, record: RolloutRecord) -> str:
    if place < record.stage or record.state == "completed":
        return "done"
    return ("stopped" if record.state == "paused" else "now") if place == record.stage else ""
