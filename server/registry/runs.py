"""Runs, their rounds and the tasks of each round in the registry. A run ends once, in one word; so does a task."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from sqlalchemy import select, update

from server.registry.database import Database, now
from server.registry.records import Ending, RequestRecord, RequestState, RoundRecord, RunRecord
from server.registry.tables import requests, rounds, runs

ABANDONED = "its server ended without a word"


def begin(db: Database, run: RunRecord) -> None:
    """A run goes on from here: a new one, or an earlier one resumed. Runs of the fleet that nobody ended were stopped.

    Only the server that has the fleet's lease may say so.
    """
    row = {**msgspec.to_builtins(run), "created_at": run.created_at or now(), "state": "running"}
    with db.writing() as connection:
        connection.execute(
            update(runs)
            .where(runs.c.fleet == run.fleet, runs.c.state == "running", runs.c.run != run.run)
            .values(state="stopped", reason=ABANDONED, ended_at=now())
        )
        db.put(connection, runs, [row], "created_at")


def end(db: Database, run: str, state: Ending, reason: str = "") -> bool:
    """Ends a run that goes on; False, and no change, for one that has ended."""
    with db.writing() as connection:
        ended = connection.execute(
            update(runs)
            .where(runs.c.run == run, runs.c.state == "running")
            .values(state=state, reason=reason, ended_at=now())
        )
        return ended.rowcount > 0


def stop(db: Database, run: str) -> bool:
    """Asks the server of a run to end it after the round under way; False when it does not go on."""
    with db.writing() as connection:
        asked = connection.execute(
            update(runs).where(runs.c.run == run, runs.c.state == "running").values(desired="stopped")
        )
        return asked.rowcount > 0


def get(db: Database, run: str) -> RunRecord | None:
    """One run."""
    return next(iter(db.find(select(runs).where(runs.c.run == run), RunRecord)), None)


def listed(db: Database, fleet: str = "") -> list[RunRecord]:
    """The runs of a fleet (or all), the newest first."""
    wanted = select(runs).order_by(runs.c.created_at.desc(), runs.c.run.desc())
    return db.find(wanted.where(runs.c.fleet == fleet) if fleet else wanted, RunRecord)


def note_round(db: Database, record: RoundRecord) -> None:
    """A round is over; one that is repeated after a resume replaces itself."""
    with db.writing() as connection:
        db.put(connection, rounds, [{**msgspec.to_builtins(record), "ended_at": record.ended_at or now()}])


def rounds_of(db: Database, run: str) -> list[RoundRecord]:
    """The rounds of a run that are over, in order."""
    return db.find(select(rounds).where(rounds.c.run == run).order_by(rounds.c.round), RoundRecord)


def ask(db: Database, asked: Iterable[RequestRecord]) -> None:
    """Devices were asked for something."""
    at = now()
    with db.writing() as connection:
        db.put(connection, requests, [{**msgspec.to_builtins(run_id), "asked_at": at} for run_id in asked])


def settle(
    db: Database, fleet: str, id: str, state: RequestState, reason: str = "", *, device: str | None = None
) -> int:
    """Ends the tasks `id` that are still queued, of one device or of all; how many there were."""
    open_tasks = [requests.c.fleet == fleet, requests.c.id == id, requests.c.state == "queued"]
    if device is not None:
        open_tasks.append(requests.c.device == device)
    with db.writing() as connection:
        return connection.execute(
            update(requests).where(*open_tasks).values(state=state, reason=reason, ended_at=now())
        ).rowcount


def requests_of(db: Database, run: str, round: int | None = None) -> list[RequestRecord]:
    """The tasks of a run, or of one of its rounds."""
    wanted = (
        select(requests)
        .where(requests.c.run == run)
        .order_by(requests.c.round, requests.c.asked_at, requests.c.device)
    )
    return db.find(wanted if round is None else wanted.where(requests.c.round == round), RequestRecord)
