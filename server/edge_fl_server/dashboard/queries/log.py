"""Events of a fleet, the newest first: runs, rounds, releases, roll-outs, rejections and failures, merged by the database."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from msgspec import Struct
from sqlalchemy import ColumnElement, Select, Text, cast, literal, select, union_all

from edge_fl_server.registry import Database
from edge_fl_server.registry.tables import devices, rejections, releases, requests, rollouts, rounds, runs

NEWEST = 200
LEVELS = ("info", "warning", "error")


class Event(Struct, frozen=True):
    """One event; `subject` names a device, run or release, depending on `kind`."""

    at: str
    level: str
    kind: str
    subject: str
    text: str


def newest(db: Database, fleet: str, level: str = "") -> tuple[Event, ...]:
    """The newest events of a fleet, of one level or all."""
    parts = [part.limit(NEWEST).subquery() for part in _parts(fleet)]
    events = union_all(*(select(part) for part in parts)).subquery()
    query = select(events).order_by(events.c.at.desc()).limit(NEWEST)
    if level in LEVELS:
        query = query.where(events.c.level == level)
    return tuple(db.find(query, Event))


def _parts(fleet: str) -> list[Select[Any]]:
    """One query per kind of event, each the newest first."""
    run, round, release, rollout = runs.c, rounds.c, releases.c, rollouts.c
    rejection, request, device = rejections.c, requests.c, devices.c
    started = run.fleet == fleet
    failed = started & (run.state == "failed")
    ended = started & (run.ended_at != "") & (run.state != "failed")
    unsuccessful = (request.fleet == fleet) & request.state.in_(("failed", "timed_out"))
    quarantined = (device.fleet == fleet) & (device.quarantine != "")
    revoked = (device.fleet == fleet) & device.revoked
    responses = _text("round ", round.round, ": ", round.responded, " of ", round.selected, " responded")
    published = _text("published, from round ", release.round, " of ", release.run)
    outcome = _text(rollout.state, ": ", rollout.reason)
    rejected = _text(rejection.reason, ": ", rejection.detail)
    failure = _text(request.mode, " ", request.state, ": ", request.reason)
    return [
        _part("info", "run", run.created_at, run.run, _text(run.method, " on ", run.dataset), started),
        _part("info", "run", run.ended_at, run.run, _text(run.state, ": ", run.reason), ended),
        _part("error", "run", run.ended_at, run.run, _text("failed: ", run.reason), failed),
        _part("info", "round", round.ended_at, round.run, responses, started & (run.run == round.run)),
        _part("info", "release", release.published_at, release.release, published, release.fleet == fleet),
        _part("info", "roll-out", rollout.changed_at, rollout.release, outcome, rollout.fleet == fleet),
        _part(
            "warning", "rejected", rejection.received_at, rejection.device, rejected, rejection.fleet == fleet
        ),
        _part("warning", "request", request.ended_at, request.device, failure, unsuccessful),
        _part("error", "quarantine", device.blocked_at, device.device, device.quarantine, quarantined),
        _part("info", "revoked", device.blocked_at, device.device, literal("certificate revoked"), revoked),
    ]


def _part(level: str, kind: str, at: Any, subject: Any, text: Any, where: ColumnElement[bool]) -> Select[Any]:
    columns = (at.label("at"), literal(level).label("level"), literal(kind).label("kind"))
    named = (cast(subject, Text).label("subject"), text.label("text"))
    return select(*columns, *named).where(where).order_by(at.desc())


def _text(*parts: Any) -> ColumnElement[Any]:
    """Columns and literals joined to one text."""
    first, *rest = (literal(part) if isinstance(part, str) else cast(part, Text) for part in parts)
    return reduce(add, rest, first)
