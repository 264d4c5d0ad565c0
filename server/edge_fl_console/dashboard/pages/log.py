"""The events of a fleet, the newest first."""

from collections.abc import Collection
from functools import reduce
from operator import add
from typing import Any

from msgspec import Struct
from nicegui import ui
from sqlalchemy import ColumnElement, Select, Text, case, cast, func, literal, select, union_all

from edge_fl.console.units import clock, escape
from edge_fl.failures import SIGNATURE
from edge_fl_console import failure_texts
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.parts import TOGGLE, PageColumn, device_link, empty, heading, run_link, word
from edge_fl_server.registry import Database, audit
from edge_fl_server.registry.rollouts import NO_RUN
from edge_fl_server.registry.tables import devices, rejections, releases, requests, rollouts, rounds, runs

NEWEST = 200
LEVELS = ("info", "warning", "error")


class Event(Struct, frozen=True):
    """One event, or `times` equal ones since `first`, `at` the last; `subject` names a device, run or release, depending on `kind`.

    Of equal events of several `subjects` it is one of them.
    """

    at: str
    level: str
    kind: str
    subject: str
    text: str
    times: int = 1
    first: str = ""
    subjects: int = 1


def newest(
    db: Database, fleet: str, level: str = "", *, without: Collection[str] = (), most: int = NEWEST
) -> tuple[Event, ...]:
    """The newest events of a fleet, of one level or all, `without` some kinds; equal ones are one event."""
    parts = [part.limit(NEWEST).subquery() for part in _parts(fleet)]
    events = union_all(*(select(part) for part in parts)).subquery()
    query = select(events).where(events.c.kind.not_in(without)).order_by(events.c.at.desc()).limit(most)
    if level in LEVELS:
        query = query.where(events.c.level == level)
    return tuple(db.find(query, Event))


def _parts(fleet: str) -> list[Select[Any]]:
    """One query per kind of event, each the newest first."""
    run, release, rollout = runs.c, releases.c, rollouts.c
    device, reason = devices.c, rejections.c.reason
    started = run.fleet == fleet
    failed = started & (run.state == "failed")
    ended = started & (run.ended_at != "") & (run.state != "failed")
    quarantined = (device.fleet == fleet) & (device.quarantine != "")
    revoked = (device.fleet == fleet) & device.revoked
    published = case(
        (release.run == NO_RUN, literal("published; no run trained it")),
        else_=_text("published, from round ", release.round, " of ", release.run),
    )
    back = rollout.release < rollout.previous
    what = case(
        (rollout.state == "rolled_back", _returned(rollout.release, rollout.previous)),
        ((rollout.state == "completed") & back, _returned(rollout.previous, rollout.release)),
        else_=_text(rollout.state, ": "),
    )
    asker = case((back | (rollout.state == "rolled_back"), audit.asked_by()))
    outcome = _text(what, rollout.reason, func.coalesce(_text("; asked by ", asker), ""))
    troubled = case((rollout.state.in_(("paused", "aborted", "rolled_back")), "warning"), else_="info")
    return [
        _part("info", "run", run.created_at, run.run, _text(run.method, " on ", run.dataset), started),
        _part("info", "run", run.ended_at, run.run, _text(run.state, ": ", run.reason), ended),
        _part("error", "run", run.ended_at, run.run, _text("failed: ", run.reason), failed),
        _part("info", "release", release.published_at, release.release, published, release.fleet == fleet),
        _part(troubled, "roll-out", rollout.changed_at, rollout.release, outcome, rollout.fleet == fleet),
        _part("error", "quarantine", device.blocked_at, device.device, device.quarantine, quarantined),
        _part("info", "revoked", device.blocked_at, device.device, literal("certificate revoked"), revoked),
        _rounds(fleet),
        # Rejections of a device for the same reason are one event. Messages of all devices with the same fault of their signatures are
        # one, too: the broker is at fault, not a device.
        _newest_rejections(fleet, reason.not_in(SIGNATURE), rejections.c.device, reason),
        _newest_rejections(fleet, reason.in_(SIGNATURE), reason),
        _requests(fleet),
    ]


def _rounds(fleet: str) -> Select[Any]:
    """Rounds of a run with the same numbers of devices are one event, with the first and the newest round's number."""
    same = (rounds.c.run, rounds.c.selected, rounds.c.responded)
    first, newest, count = func.min(rounds.c.round), func.max(rounds.c.round), func.count()
    which = case(
        (count == 1, _text("round ", newest)),
        (newest - first + 1 == count, _text("rounds ", first, "–", newest)),
        else_=_text(count, " of the rounds ", first, "–", newest),
    )
    text = which + _text(": ", rounds.c.responded, " of ", rounds.c.selected, " responded")
    at, mine = rounds.c.ended_at, (runs.c.fleet == fleet) & (runs.c.run == rounds.c.run)
    counts = {"times": func.count(), "first": func.min(at)}
    return _part("info", "round", func.max(at), rounds.c.run, text, mine, **counts).group_by(*same)


def _newest_rejections(fleet: str, where: ColumnElement[bool], *key: Any) -> Select[Any]:
    """An event per `key`, with the newest device and detail, and the number of devices."""
    at, device = rejections.c.received_at, rejections.c.device
    sums = {
        "number": func.max(rejections.c.number),
        "times": func.count(),
        "first": func.min(at),
        "subjects": func.count(device.distinct()),
    }
    named = (total.label(name) for name, total in sums.items())
    each = select(*named).where(rejections.c.fleet == fleet, where).group_by(*key).subquery()
    text = _text(rejections.c.reason, ": ", rejections.c.detail)
    counts = {"times": each.c.times, "first": each.c.first, "subjects": each.c.subjects}
    newest = rejections.c.number == each.c.number
    return _part("warning", "rejected", at, device, text, newest, **counts)


def _requests(fleet: str) -> Select[Any]:
    """Requests of a run that ended alike are one event."""
    row, at = requests.c, requests.c.ended_at
    text = _text(row.mode, " ", row.state, ": ", row.reason)
    counts = {"times": func.count(), "first": func.min(at), "subjects": func.count(row.device.distinct())}
    failed = (row.fleet == fleet) & row.state.in_(("failed", "timed_out"))
    alike = _part("warning", "request", func.max(at), func.min(row.device), text, failed, **counts)
    return alike.group_by(text, row.run)


def _returned(left: Any, to: Any) -> ColumnElement[Any]:
    return _text("rolled back from release ", left, " to ", to, ": ")


def _part(
    level: Any, kind: str, at: Any, subject: Any, text: Any, where: ColumnElement[bool], **counts: Any
) -> Select[Any]:
    """The fields of an `Event`, the newest first; without `counts` (times, first, subjects) each is listed by itself."""
    shade = literal(level) if isinstance(level, str) else level
    named = {"at": at, "level": shade, "kind": literal(kind), "subject": cast(subject, Text), "text": text}
    named |= {"times": literal(1), "first": at, "subjects": literal(1)} | counts
    return select(*(column.label(name) for name, column in named.items())).where(where).order_by(at.desc())


def _text(*parts: Any) -> ColumnElement[Any]:
    """Columns and literals joined to one text."""
    first, *rest = (literal(part) if isinstance(part, str) else cast(part, Text) for part in parts)
    return reduce(add, rest, first)


DEVICES = frozenset({"rejected", "request", "quarantine", "revoked"})
RUNS = frozenset({"run", "round"})
"""Kinds of events whose subject is a device or a run; of all others it is a release."""


def plain(event: Event) -> str:
    """What happened."""
    shown = event.text.strip(": ").replace("timed_out", "timed out").replace("rolled_back", "rolled back")
    shown = shown.removeprefix("replaced: ")
    if event.kind == "rejected":
        reason, _, detail = shown.partition(": ")
        shown = failure_texts.rejected(reason) + (f": {detail}" if detail else "")
    elif event.kind == "quarantine":
        shown = failure_texts.quarantined(shown)
    return shown


def text(event: Event) -> str:
    """What happened, and how often since when."""
    often = "" if event.kind == "round" else f"{event.times:,} times "  # rounds are named in the text
    again = f' <span class="quiet">{often}since {clock(event.first)}</span>' if event.times > 1 else ""
    return escape(plain(event)) + again


def subject(event: Event) -> str:
    """A link to the device, run or release; of several devices to one of them."""
    if event.kind in DEVICES:
        more = f' <span class="quiet">and {event.subjects - 1:,} more</span>' if event.subjects > 1 else ""
        return device_link(event.subject) + more
    return (
        run_link(event.subject) if event.kind in RUNS else f'<a href="/releases">{escape(event.subject)}</a>'
    )


COLUMNS = (
    PageColumn("Time, UTC", "at", clock),
    PageColumn("Level", "level", word),
    PageColumn("Kind", "kind"),
    PageColumn("Subject", "subject", cell=subject),
    PageColumn("Text", "text", cell=text),
)
NOTE = empty("No events", "Runs, rounds, releases, rejections and failures are listed here.")


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    level = address.get("level", "")

    def find() -> tuple[Event, ...]:
        return newest(board.context.db, board.context.fleet, level)

    async def choose(event: Any) -> None:
        nonlocal level
        level = event.value
        ui.navigate.history.replace(f"/log?level={level}" if level else "/log")
        await board.refresh()

    ui.html(heading("Log"), sanitize=False)
    with ui.element("div").classes("bar"):
        ui.toggle(
            {"": "all"} | {name: name for name in LEVELS},
            value=level if level in LEVELS else "",
            on_change=choose,
        ).props(TOGGLE)
    board.html(find, lambda events: "" if events else NOTE)
    board.table(find, COLUMNS, lambda events: events)
