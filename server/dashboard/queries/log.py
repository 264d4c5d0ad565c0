"""What happened, the newest first: runs, rounds, releases, roll-outs, refusals and failures, put together from the registry."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from sqlalchemy import ColumnElement, Select, Text, cast, literal, select, union_all

from server.registry import Database
from server.registry.tables import devices, rejections, releases, requests, rollouts, rounds, runs

NEWEST = 200
LEVELS = ("info", "warning", "error")


class Event(Struct, frozen=True):
    """One thing that happened."""

    at: str
    level: str
    kind: str
    subject: str
    text: str


def newest(db: Database, fleet: str, level: str = "", *, limit: int = NEWEST) -> tuple[Event, ...]:
    """The newest events of a fleet, of one level or all."""
    parts = [part.limit(limit).subquery() for part in _parts(fleet)]
    both = union_all(*(select(part) for part in parts)).subquery()
    wanted = select(both).order_by(both.c.at.desc()).limit(limit)
    if level in LEVELS:
        wanted = wanted.where(both.c.level == level)
    return tuple(db.find(wanted, Event))


def _parts(fleet: str) -> list[Select[Any]]:
    begun = runs.c.fleet == fleet
    ended = begun & (runs.c.ended_at != "")
    bad = (runs.c.state == "failed") & begun
    of_run = rounds.join(runs, runs.c.run == rounds.c.run)
    failed = (requests.c.fleet == fleet) & requests.c.state.in_(("failed", "timed_out"))
    barred = (devices.c.fleet == fleet) & (devices.c.quarantine != "")
    return [
        _part(runs.c.created_at, "info", "run", runs.c.run, runs.c.method + " on " + runs.c.dataset, begun),
        _part(runs.c.ended_at, "info", "run", runs.c.run, runs.c.state + ": " + runs.c.reason, ended & ~bad),
        _part(runs.c.ended_at, "error", "run", runs.c.run, "failed: " + runs.c.reason, bad),
        _part(
            rounds.c.ended_at,
            "info",
            "round",
            rounds.c.run,
            "round "
            + cast(rounds.c.round, Text)
            + ": "
            + cast(rounds.c.responded, Text)
            + " of "
            + cast(rounds.c.selected, Text)
            + " answered",
            begun,
        ).select_from(of_run),
        _part(
            releases.c.published_at,
            "info",
            "release",
            cast(releases.c.release, Text),
            "published, from round " + cast(releases.c.round, Text) + " of " + releases.c.run,
            releases.c.fleet == fleet,
        ),
        _part(
            rollouts.c.changed_at,
            "info",
            "roll-out",
            cast(rollouts.c.release, Text),
            rollouts.c.state + ": " + rollouts.c.reason,
            rollouts.c.fleet == fleet,
        ),
        _part(
            rejections.c.received_at,
            "warning",
            "refused",
            rejections.c.device,
            rejections.c.reason + ": " + rejections.c.detail,
            rejections.c.fleet == fleet,
        ),
        _part(
            requests.c.ended_at,
            "warning",
            "run_id",
            requests.c.device,
            requests.c.mode + " " + requests.c.state + ": " + requests.c.reason,
            failed,
        ),
        _part(devices.c.seen_at, "error", "quarantine", devices.c.device, devices.c.quarantine, barred),
    ]


def _part(
    at: ColumnElement[Any], level: str, kind: str, subject: ColumnElement[Any], text: Any, where: Any
) -> Select[Any]:
    columns = (at.label("at"), literal(level).label("level"), literal(kind).label("kind"))
    return select(*columns, subject.label("subject"), text.label("text")).where(where).order_by(at.desc())
