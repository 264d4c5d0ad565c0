"""The events of a fleet, the newest first; the database searches them, and the address keeps the query."""

from collections.abc import Collection
from datetime import date, timedelta
from functools import reduce
from operator import add
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from nicegui import ui
from sqlalchemy import (
    ColumnElement,
    Select,
    Text,
    and_,
    case,
    cast,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
)

from edge_fl.console.units import clock, counted, escape, number
from edge_fl.errors import InputError
from edge_fl.failures import SIGNATURE, Failure
from edge_fl_console import failure_texts
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.parts import (
    TOGGLE,
    PageColumn,
    cut_text,
    device_link,
    empty,
    heading,
    run_link,
    word,
)
from edge_fl_server.registry import Database, audit
from edge_fl_server.registry.rollouts import NO_RUN
from edge_fl_server.registry.tables import devices, rejections, releases, requests, rollouts, rounds, runs

NEWEST = 200
STATES = ("timed_out", "rolled_back", "budget_exhausted")
"""The states of two words."""
LEVELS = ("info", "warning", "error")
Days = tuple[str, str]
"""The first day, and the day after the last one, as YYYY-MM-DD in UTC; "" for none."""


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


class LogQuery(Struct, frozen=True):
    """Level, search, and the first and last day in UTC as YYYY-MM-DD; "" for all. Every field may come from the address bar."""

    level: str = ""
    search: str = ""
    since: str = msgspec.field(default="", name="from")
    until: str = msgspec.field(default="", name="to")


class LogPage(Struct, frozen=True):
    """The events that match a query; `wrong` is why it cannot be used."""

    events: tuple[Event, ...] = ()
    wrong: str = ""


def read(db: Database, fleet: str, query: LogQuery) -> LogPage:
    """The newest events that match a query. Raises RunError when the registry does not respond."""
    try:
        days = period(query.since, query.until)
    except InputError as error:
        return LogPage(wrong=error.message)
    return LogPage(newest(db, fleet, query.level, query.search, days))


def period(since: str, until: str) -> Days:
    """The days from the first to the last one. Raises InputError."""
    for name, given in (("from", since), ("to", until)):
        if given and not _day(given):
            raise InputError(f"{name}: {given[:40]!r}, expected a day such as 2026-11-20")
    first, last = _day(since), _day(until)
    if first and last and first > last:
        raise InputError(f"from {since} to {until}: expected the earlier day first")
    after = last + timedelta(1) if last and last < date.max else None
    return str(first or ""), str(after or "")


def _day(text: str) -> date | None:
    """The day of this text; None for anything else."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


def newest(
    db: Database,
    fleet: str,
    level: str = "",
    search: str = "",
    days: Days = ("", ""),
    *,
    without: Collection[str] = (),
    most: int = NEWEST,
) -> tuple[Event, ...]:
    """The newest events of a fleet that match, `without` some kinds; equal ones are one event."""
    parts = []
    for each in _parts(fleet, days, search):
        part = each.subquery()
        shown = (part.c.kind.not_in(without), _during(part.c.at, days), *_matching(part.c, level, search))
        parts.append(select(part).where(*shown).order_by(part.c.at.desc()).limit(most).subquery())
    events = union_all(*(select(part) for part in parts)).subquery()
    return tuple(db.find(select(events).order_by(events.c.at.desc()).limit(most), Event))


def _matching(event: Any, level: str, search: str) -> list[ColumnElement[bool]]:
    """The conditions of a level and a search: in kind, subject and text, and in what the page writes for a failure word."""
    conditions = [event.level == level] if level in LEVELS else []
    if search:
        plain = search.replace("_", " ")
        columns = (event.kind, event.subject, func.replace(event.text, "_", " "))
        found = [column.icontains(plain, autoescape=True) for column in columns]
        for failure in Failure:
            if plain.lower() in failure_texts.rejected(failure).lower():
                found += [
                    and_(event.kind == "rejected", event.text.startswith(f"{failure}:", autoescape=True)),
                    and_(event.kind == "quarantine", event.text.contains(f"of {failure}", autoescape=True)),
                ]
        conditions.append(or_(*found))
    return conditions


def _during(moment: ColumnElement[str], days: Days) -> ColumnElement[bool]:
    """Whether a time is at or after the first of these days and before the second one."""
    first, after = days
    return and_(moment >= first, *([moment < after] if after else []))


def _parts(fleet: str, days: Days, search: str) -> list[Select[Any]]:
    """One query per kind of event; of equal ones only those of these days are counted, and their subject is one that the search names."""
    run, release, rollout = runs.c, releases.c, rollouts.c
    device, reason = devices.c, rejections.c.reason
    started = run.fleet == fleet
    failed = started & (run.state == "failed")
    ended = started & (run.ended_at != "") & (run.state != "failed")
    how = _text(run.state, ": ", run.reason)
    said = case((run.reason.startswith(run.state), run.reason), else_=how)  # "stopped by Ctrl-C"
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
        _part("info", "run", run.ended_at, run.run, said, ended),
        _part("error", "run", run.ended_at, run.run, _text("failed: ", run.reason), failed),
        _part("info", "release", release.published_at, release.release, published, release.fleet == fleet),
        _part(troubled, "roll-out", rollout.changed_at, rollout.release, outcome, rollout.fleet == fleet),
        _part("error", "quarantine", device.blocked_at, device.device, device.quarantine, quarantined),
        _part("info", "revoked", device.blocked_at, device.device, literal("certificate revoked"), revoked),
        _rounds(fleet, days),
        # Rejections of a device for the same reason are one event. Messages of all devices with the same fault of their signatures are
        # one, too: the broker is at fault, not a device.
        _newest_rejections(fleet, days, search, reason.not_in(SIGNATURE), rejections.c.device, reason),
        _newest_rejections(fleet, days, search, reason.in_(SIGNATURE), reason),
        _requests(fleet, days, search),
    ]


def _rounds(fleet: str, days: Days) -> Select[Any]:
    """Rounds of a run with the same numbers of devices are one event, with the first and the newest round's number."""
    same = (rounds.c.run, rounds.c.selected, rounds.c.responded)
    first, newest, count = func.min(rounds.c.round), func.max(rounds.c.round), func.count()
    which = case(
        (count == 1, _text("round ", newest)),
        (newest - first + 1 == count, _text("rounds ", first, "–", newest)),
        else_=_text(count, " of the rounds ", first, "–", newest),
    )
    text = which + _text(": ", rounds.c.responded, " of ", rounds.c.selected, " responded")
    at = rounds.c.ended_at
    mine = (runs.c.fleet == fleet) & (runs.c.run == rounds.c.run) & _during(at, days)
    counts = {"times": func.count(), "first": func.min(at)}
    return _part("info", "round", func.max(at), rounds.c.run, text, mine, **counts).group_by(*same)


def _newest_rejections(
    fleet: str, days: Days, search: str, where: ColumnElement[bool], *key: Any
) -> Select[Any]:
    """An event per `key`, with the newest device and detail, and the number of devices."""
    at, device = rejections.c.received_at, rejections.c.device
    sums = {
        "number": func.max(rejections.c.number),
        "times": func.count(),
        "first": func.min(at),
        "subjects": func.count(device.distinct()),
        "searched": _searched(device, search),
    }
    named = (total.label(name) for name, total in sums.items())
    mine = (rejections.c.fleet == fleet) & _during(at, days)
    each = select(*named).where(mine, where).group_by(*key).subquery()
    text = _text(rejections.c.reason, ": ", rejections.c.detail)
    counts = {"times": each.c.times, "first": each.c.first, "subjects": each.c.subjects}
    newest = rejections.c.number == each.c.number
    shown = func.coalesce(each.c.searched, device)
    return _part("warning", "rejected", at, shown, text, newest, **counts)


def _searched(device: ColumnElement[str], search: str) -> ColumnElement[Any]:
    """The first of several devices that a search names; NULL for none."""
    return func.min(case((device.icontains(search, autoescape=True), device))) if search else null()


def _requests(fleet: str, days: Days, search: str) -> Select[Any]:
    """Requests of a run that ended alike are one event."""
    row, at = requests.c, requests.c.ended_at
    text = _text(row.mode, " ", row.state, ": ", row.reason)
    counts = {"times": func.count(), "first": func.min(at), "subjects": func.count(row.device.distinct())}
    failed = (row.fleet == fleet) & row.state.in_(("failed", "timed_out")) & _during(at, days)
    shown = func.coalesce(_searched(row.device, search), func.min(row.device))
    alike = _part("warning", "request", func.max(at), shown, text, failed, **counts)
    return alike.group_by(text, row.run)


def _returned(left: Any, to: Any) -> ColumnElement[Any]:
    return _text("rolled back from release ", left, " to ", to, ": ")


def _part(
    level: Any, kind: str, at: Any, subject: Any, text: Any, where: ColumnElement[bool], **counts: Any
) -> Select[Any]:
    """The fields of an `Event`; without `counts` (times, first, subjects) each is listed by itself."""
    shade = literal(level) if isinstance(level, str) else level
    named = {"at": at, "level": shade, "kind": literal(kind), "subject": cast(subject, Text), "text": text}
    named |= {"times": literal(1), "first": at, "subjects": literal(1)} | counts
    return select(*(column.label(name) for name, column in named.items())).where(where)


def _text(*parts: Any) -> ColumnElement[Any]:
    """Columns and literals joined to one text."""
    first, *rest = (literal(part) if isinstance(part, str) else cast(part, Text) for part in parts)
    return reduce(add, rest, first)


DEVICES = frozenset({"rejected", "request", "quarantine", "revoked"})
RUNS = frozenset({"run", "round"})
"""Kinds of events whose subject is a device or a run; of all others it is a release."""


def plain(event: Event) -> str:
    """What happened."""
    shown = event.text.strip(": ").removeprefix("replaced: ")
    for state in STATES:
        shown = shown.replace(state, state.replace("_", " "))
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
    return cut_text(plain(event)) + again


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
EVERY = LogQuery()


def note(page: LogPage, query: LogQuery) -> str:
    """Why there are no events, or how many there are."""
    if page.wrong:
        return empty("Wrong date", f"{page.wrong}.")
    if not page.events:
        return (
            NOTE
            if query == EVERY
            else empty("No matching event", "No event matches the search and the filters.")
        )
    count = len(page.events)
    more = f"The newest {number(NEWEST)} events; a search or dates find older ones."
    return f'<p class="quiet">{more if count == NEWEST else counted(count, "event")}</p>'


def query_of(address: Address) -> LogQuery:
    """The query of an address."""
    return msgspec.convert(dict(address), LogQuery)


def address_of(query: LogQuery) -> str:
    """The address of a query, without fields that are empty."""
    given = {name: value for name, value in msgspec.to_builtins(query).items() if value}
    return f"/log?{urlencode(given)}" if given else "/log"


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    query = query_of(address)

    def find() -> LogPage:
        return read(board.context.db, board.context.fleet, query)

    async def change(**fields: str) -> None:
        nonlocal query
        query = replace(query, **fields)
        ui.navigate.history.replace(address_of(query))
        await board.refresh()

    ui.html(heading("Log"), sanitize=False)
    with ui.element("div").classes("bar"):
        search = ui.input(placeholder="Search  /", value=query.search)
        search.props('type=search dense outlined debounce=300 aria-label="Search the log"')
        search.on_value_change(lambda event: change(search=str(event.value or "")[:80]))
        with board.filters(lambda: sum(map(bool, (query.level, query.since, query.until)))):
            shown = query.level if query.level in LEVELS else ""
            level = ui.toggle({"": "all"} | {name: name for name in LEVELS}, value=shown)
            level.props(TOGGLE).on_value_change(lambda event: change(level=event.value))
            for field, label in (("since", "From"), ("until", "To")):
                day = ui.input(value=str(_day(getattr(query, field)) or "")).classes("day")
                day.props(f'type=date dense outlined prefix={label} aria-label="{label}, UTC day"')
                day.on_value_change(lambda event, field=field: change(**{field: str(event.value or "")}))
    board.html(find, lambda page: note(page, query))
    board.table(find, COLUMNS, lambda page: page.events)
