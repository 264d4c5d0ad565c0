"""What changed in a fleet since a time: the events of the dashboard's log, alerts, new devices, and what people did."""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter

from msgspec import Struct

from edge_fl.console import units
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import shortened
from edge_fl_console.alerts import stored
from edge_fl_console.dashboard.pages import log
from edge_fl_server.registry import Database, audit, registered_devices

COLUMNS: Columns = {
    "at": Column("time, UTC", units.clock),
    "kind": "kind",
    "subject": "about",
    "text": Column("what", units.cut_prose, prose=True),
}
Row = dict[str, str]
MINUTE = len("2026-11-28T02:54")
SHOWN = 3
MOST = 2000
"""Events of the log that are read at once; as many actions of people are `audit.MAX_SHOWN`."""


class Changes(Struct, frozen=True):
    """Rows, newest first; `complete` is the time from which on they are all changes: later than asked for if there are too many."""

    rows: list[Row]
    complete: datetime


def since(db: Database, fleet: str, start: datetime) -> Changes:
    """The changes from `start` on."""
    at = start.isoformat(timespec="milliseconds")
    events, actions = list(_events(db, fleet, at)), list(_actions(db, fleet, at))
    cut = [rows[-1]["at"] for rows, most in ((events, MOST), (actions, audit.MAX_SHOWN)) if len(rows) >= most]
    first = max([at, *cut])
    found = [*events, *_alerts(db, fleet, start), *_devices(db, fleet), *actions]
    recent = sorted((row for row in found if row["at"] >= first), key=itemgetter("at"), reverse=True)
    alike = groupby(recent, lambda row: (row["at"][:MINUTE], row["kind"], row["text"]))
    return Changes([_together(list(rows)) for _, rows in alike], datetime.fromisoformat(first))


def _together(rows: list[Row]) -> Row:
    """The same that happened to several within a minute, as one change."""
    return {**rows[0], "subject": shortened([row["subject"] for row in rows], SHOWN)}


def _events(db: Database, fleet: str, at: str) -> Iterator[Row]:
    for event in log.newest(db, fleet, days=(at, ""), most=MOST):
        often = f", {event.times:,} times since {units.clock(event.first)}" if event.times > 1 else ""
        more = f" and {event.subjects - 1:,} more" if event.subjects > 1 else ""
        of = {"release": "release ", "roll-out": "release "}.get(event.kind, "")
        yield _row(event.at, event.kind, f"{of}{event.subject}{more}", f"{log.plain(event)}{often}")


def _alerts(db: Database, fleet: str, start: datetime) -> Iterator[Row]:
    for alert in stored.listed(db, fleet, int(start.timestamp())):
        yield _row(_time(alert.raised_s), f"alert {alert.rule}", alert.subject, alert.text)
        if alert.resolved_s:
            yield _row(
                _time(alert.resolved_s), f"alert {alert.rule}", alert.subject, f"resolved: {alert.text}"
            )


def _devices(db: Database, fleet: str) -> Iterator[Row]:
    for device in registered_devices.listed(db, fleet):
        if device.first_seen_at:
            yield _row(device.first_seen_at, "device", device.device, "seen for the first time")


def _actions(db: Database, fleet: str, at: str) -> Iterator[Row]:
    for action in audit.listed(db, fleet, since=at):
        result = "" if action.result == audit.DONE else f": {action.result}"
        yield _row(action.at, action.action, action.target, f"by {action.who}{result}")


def _row(at: str, kind: str, subject: str, text: str) -> Row:
    return {"at": at, "kind": kind, "subject": subject, "text": text}


def _time(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
