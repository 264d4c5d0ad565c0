"""Releases: the devices that run each of them, the current roll-out with its stages, and the buttons that control it."""

from collections.abc import Callable
from functools import partial

from msgspec import Struct
from nicegui import ui
from sqlalchemy import func, select

from edge_fl.console.units import NOTHING, clock, escape, mean, number, positive, share, size
from edge_fl.errors import InputError
from edge_fl_console import accuracy
from edge_fl_console.accuracy import Change, HeadReports
from edge_fl_console.dashboard.actions import command_words
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.parts import (
    PageColumn,
    button,
    empty,
    facts,
    gain,
    heading,
    meaning,
    means,
    run_link,
    word,
)
from edge_fl_server.registry import Database, audit, fleets, rollouts, runs
from edge_fl_server.registry.fleets import Presence
from edge_fl_server.registry.registered_devices import HEAD_ONLY, of_fleet
from edge_fl_server.registry.rollouts import NO_RUN
from edge_fl_server.registry.tables import ReleaseRecord, RolloutRecord, devices

NEWEST = 50


class ReleaseRow(Struct, frozen=True):
    """One release and the number of devices that run it, also as a part of all head-only devices.

    `startable`: a roll-out of it may start; `served`: the fleet serves it; `older`: than the one that it serves; `replaces`: the release
    that its first roll-out replaced (0: none); `withdrawn`: the roll-out in which it was aborted or rolled back, if it was not rolled out
    again; `run_known`: the run that trained it is in this registry.
    """

    record: ReleaseRecord
    running: int
    part: float
    reports: HeadReports
    startable: bool
    served: bool
    older: bool
    replaces: int
    withdrawn: RolloutRecord | None = None
    run_known: bool = False


class RolloutRow(Struct, frozen=True):
    """A roll-out and who asked for it ("": no person, or unknown)."""

    record: RolloutRecord
    asked_by: str = ""


class ReleasesPage(Struct, frozen=True):
    """Releases by number and roll-outs, the newest first, `agents` those of the agent's software; `heads` counts the head-only devices.

    `back` is the release that a roll-back of the whole fleet returns (0: none, or a roll-out is under way). `change` is that by the
    release in service.
    """

    releases: dict[int, ReleaseRow]
    rollouts: tuple[RolloutRow, ...]
    agents: tuple[RolloutRow, ...]
    current: RolloutRecord | None
    heads: int
    served: int
    back: int
    server: Presence
    change: Change


def read(db: Database, fleet: str, kept: frozenset[int] | None = None) -> ReleasesPage:
    """The releases and roll-outs of a fleet; `kept` are the releases whose files exist, None if that is unknown.

    Then only a server that is online, which has them, can roll one out.
    """
    recent = tuple(rollouts.listed(db, fleet)[:NEWEST])
    by_release = select(devices.c.release, func.count()).where(of_fleet(fleet), HEAD_ONLY)
    running = db.pairs(by_release.group_by(devices.c.release))
    head_only = sum(running.values())
    fitted = accuracy.head_reports(db, fleet)
    current = next((record for record in recent if record.state not in rollouts.OVER), None)
    served = rollouts.served_release(db, fleet) or max(running, default=0)
    replaces = {record.release: record.previous for record in recent if record.previous}
    server, withdrawn = fleets.presence(db, fleet), rollouts.withdrawn(recent)
    known = {run.run for run in runs.listed(db, fleet)}
    usable = current is None and (kept is not None or server.online)
    back = _way_back(db, fleet, kept) if usable else 0
    rows = {
        record.release: ReleaseRow(
            record,
            running.get(record.release, 0),
            min(running.get(record.release, 0) / max(head_only, 1), 1.0),
            fitted.get(record.release, HeadReports()),
            startable=usable and record.release != served and (kept is None or record.release in kept),
            served=record.release == served,
            older=record.release < served,
            replaces=replaces.get(record.release, 0),
            withdrawn=withdrawn.get(record.release),
            run_known=record.run in known,
        )
        for record in rollouts.releases_of(db, fleet)[:NEWEST]
    }
    askers = audit.askers(db, fleet)
    shown = tuple(RolloutRow(record, askers.get(record.number, "")) for record in recent)
    agents = tuple(RolloutRow(record) for record in rollouts.listed(db, fleet, "agent")[:NEWEST])
    by_service = accuracy.change(db, fleet, served)
    return ReleasesPage(rows, shown, agents, current, head_only, served, back, server, by_service)


def _way_back(db: Database, fleet: str, kept: frozenset[int] | None) -> int:
    try:
        return rollouts.way_back(db, fleet, kept=kept).to
    except InputError:
        return 0


END = (("abort", "Abort", "danger"), ("rollback", "Roll back", "danger"))
BUTTONS = {"running": (("pause", "Pause", ""),), "paused": (("resume", "Resume", "primary"),)}
"""State of a roll-out -> action, label and look of its buttons; those of END only if there is a previous release."""
REQUESTED = {
    "paused": "pause requested",
    "running": "requested",
    "aborted": "abort requested",
    "rolled_back": "roll-back requested",
}
"""Desired state -> its name."""

ROLLOUTS = (
    PageColumn("No.", "record.number", number),
    PageColumn("Release", "record.release", number),
    PageColumn("Replaces", "record.previous", positive),
    PageColumn("State", "record.state", word),
    PageColumn(
        "Stage", "record.stage", cell=lambda row: f"{row.record.stage + 1} of {len(row.record.shares)}"
    ),
    PageColumn("Started, UTC", "record.created_at", clock),
    PageColumn("Changed, UTC", "record.changed_at", clock),
    PageColumn("Asked by", "asked_by"),
    PageColumn("Reason", "record.explanation"),
)


def _running(row: ReleaseRow) -> str:
    return f'{row.running:,}<span class="meter"><i style="width:{100 * row.part:.1f}%"></i></span>'


def _accuracy(reports: HeadReports) -> str:
    return mean(reports.after, reports.measured)


def _replaces(row: ReleaseRow | None) -> str:
    return f"Release {row.replaces} → {row.record.release}" if row and row.replaces else "Before → after"


def _compared(row: ReleaseRow) -> str:
    """The means of the same devices with the model served before and with this release, and below them the mean difference."""
    if not row.reports.gain:
        return NOTHING
    before = f'<span class="quiet">release {row.replaces}:</span> ' if row.replaces else ""
    return f"<p>{before}{means(row.reports.gain)}</p><p>{gain(row.reports.gain)}</p>"


def _origin(row: ReleaseRow) -> str:
    if row.record.run == NO_RUN:
        return '<span class="quiet">no run</span>'
    run = run_link(row.record.run) if row.run_known else escape(row.record.run)
    return f"{run}, round {row.record.round:,}"


def _start(row: ReleaseRow) -> str:
    if row.served:
        return '<span class="quiet">in service</span>'
    if found := row.withdrawn:
        why = f'{word(found.state if found.state == "aborted" else "rolled_back")} <span class="quiet">{escape(found.withdrawal)}</span> '
        return why + button("again", row.record.release, "Roll out again", "danger") * row.startable
    if not row.startable:
        return ""
    if row.older:
        return button("start", row.record.release, "Roll back to this", "danger")
    return button("start", row.record.release, "Roll out")


RELEASES = (
    PageColumn("Release", "record.release", number),
    PageColumn("Action", "start", cell=_start),
    PageColumn("Running", "running", number, cell=_running),
    PageColumn("Failed", "reports.failed", number),
    PageColumn("Accuracy, mean %", "reports.after", share, cell=lambda row: _accuracy(row.reports)),
    PageColumn("Same devices, before → after, %", "reports.gain", share, cell=_compared),
    PageColumn("Method", "record.method", minor=True),
    PageColumn("Run", "record.run", cell=_origin, minor=True),
    PageColumn("Size", "record.bytes", size, minor=True),
    PageColumn("Published, UTC", "record.published_at", lambda moment: clock(moment)[:16], minor=True),
)


def current(page: ReleasesPage, command_of: Callable[[str], str] = "edge-fl {}".format) -> str:
    """The current roll-out, or the release in service; `command_of` completes a command with the options of this fleet."""
    if not page.releases:
        command = "edge-fl server run demo"
        return empty("No release yet", "The first extractor is released after round 1.", command)
    record = page.current
    if record is None:
        return _served(page)
    shares = record.shares
    row = page.releases.get(record.release)
    reports = row.reports if row else HeadReports()
    bars = "".join(
        f'<i class="{_progress(place, record)}" style="flex:{max(upto - before, 0.08):.4f}"></i>'
        for place, (before, upto) in enumerate(zip([0.0, *shares], shares, strict=False))
    )
    waits = record.desired != record.state
    acts = not page.server.online and (waits or record.state == "running")
    requested = REQUESTED[record.desired] if waits else ""
    note = "; ".join(filter(None, (requested, "waiting for a server" if acts else "")))
    state = word(record.state) if requested or not acts else ""
    back = record.release < record.previous
    title = f"{'Roll-back to' if back else 'Roll-out of'} release {record.release}"
    ends = () if not record.previous else END[:1] if back else END
    offered = () if waits else (*BUTTONS.get(record.state, ()), *ends)
    buttons = "".join(button(action, record.number, label, look) for action, label, look in offered)
    command = command_of(command_words(record)) if acts else ""
    hint = (
        f'<p class="quiet">To act now, without a server: <code>{escape(command)}</code></p>'
        if command
        else ""
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
            f"{_replaces(row)}, same devices, %": means(reports.gain),
            "Difference": gain(reports.gain),
        }
    )
    reason = f'<p class="quiet">{escape(record.reason)}</p>' if record.reason else ""
    rest = (
        f'{state}<span class="text-warn">{note}</span><span class="quiet">{stage}</span>'
        f'<span class="actions">{buttons}</span>'
    )
    return (
        f'<div id="rollout"><div class="head"><h2>{title}</h2>{rest}</div>'
        f'{hint}{reason}<div class="steps" aria-hidden="true">{bars}</div>{shown}</div>'
    )


def _served(page: ReleasesPage) -> str:
    """The release in service, how it compares with the one before, and the way back."""
    row, last = page.releases.get(page.served), page.rollouts[0].record if page.rollouts else None
    result = f"Last roll-out: release {last.release}, {word(last.state)}" if last else "There was none yet."
    why = last.explanation if last else ""
    reason = f'<span class="quiet">: {escape(why)}</span>' if why else ""
    title = f"Release {page.served} is in service" if row else "No release is in service"
    actions = button("start", page.back, f"Roll back to release {page.back}", "danger") if page.back else ""
    rest = f'<span class="quiet">No current roll-out. {result}{reason}</span><span class="actions">{actions}</span>'
    head = f'<div class="head"><h2>{title}</h2>{rest}</div>'
    if row is None:
        return head
    found, change = row.reports, page.change
    verdict = f'<div class="quiet">{meaning(change.found)}</div>' if change.found else ""
    names = f"Release {change.other} → {change.release}" if change.other else "Before → after"
    how = "last accuracy on each, " if change.rolled_back else ""
    shown = facts(
        {
            "Running": f"{row.running:,} of {page.heads:,}",
            "Failed": number(found.failed),
            "Accuracy, mean %": _accuracy(found),
            f"{names}, {how}same devices, %": means(change.found),
            "Difference": gain(change.found) + verdict,
        }
    )
    return head + shown


def build(board: PageBoard, _: Address) -> None:
    """Add the page's parts."""

    def find() -> ReleasesPage:
        return read(board.context.db, board.context.fleet, board.context.kept())

    ui.html(heading("Releases"), sanitize=False)
    board.html(find, partial(current, command_of=board.context.command))
    board.table(find, RELEASES, lambda page: page.releases.values(), "Releases")
    board.table(find, ROLLOUTS, lambda page: page.rollouts, "Roll-outs")
    board.table(find, ROLLOUTS, lambda page: page.agents, "Roll-outs of the agent's software").classes(
        "named"
    )


def _progress(place: int, record: RolloutRecord) -> str:
    if place < record.stage or record.state == "completed":
        return "done"
    return ("stopped" if record.state == "paused" else "now") if place == record.stage else ""
