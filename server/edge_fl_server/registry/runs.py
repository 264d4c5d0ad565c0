"""Runs, their rounds and the requests to devices in the registry. A run ends once, in one state; so does a request."""

from collections.abc import Iterable, Mapping
from itertools import groupby

import msgspec
from msgspec import Struct
from sqlalchemy import Update, func, select, update

from edge_fl_server.registry.database import Database, now
from edge_fl_server.registry.tables import (
    RequestRecord,
    RequestState,
    RoundRecord,
    RunEnd,
    RunRecord,
    reports,
    requests,
    rounds,
    runs,
    verdict_counts,
)

MEASURING = ("evaluate", "personalise")
"""Modes of requests whose reports hold accuracies."""

MAX_NAMES = 8  # devices named per reason
ABANDONED = "its server ended without stopping the run"


class RunTraffic(Struct, frozen=True):
    """Bytes that the devices of a run received and sent, as they count them: payloads of releases, models, updates, reports and sums.

    `rounds` has both by round, without sums.
    """

    down: int = 0
    up: int = 0
    rounds: Mapping[int, tuple[int, int]] = {}


def begin(db: Database, run: RunRecord) -> None:
    """Start or resume a run; other runs of the fleet that are still "running" become "stopped".

    Only for the server that holds the fleet's lease.
    """
    row = {**msgspec.to_builtins(run), "created_at": run.created_at or now(), "state": "running"}
    abandon(db, run.fleet, exclude=run.run)
    db.put(runs, [row], "created_at")


def abandon(db: Database, fleet: str, *, exclude: str = "") -> None:
    """End the runs of a fleet that are still "running" as "stopped". Only for the server that holds the fleet's lease."""
    others = update(runs).where(runs.c.fleet == fleet, runs.c.state == "running", runs.c.run != exclude)
    db.change(others.values(state="stopped", reason=ABANDONED, ended_at=now()))


def end(db: Database, run: str, state: RunEnd, reason: str = "") -> bool:
    """End a running run; False, and no change, if it has ended."""
    return db.change(_running(run).values(state=state, reason=reason, ended_at=now())) > 0


def stop(db: Database, run: str) -> bool:
    """Request the server of a run to stop after the current round; False if the run has ended."""
    return db.change(_running(run).values(desired="stopped")) > 0


def get(db: Database, run: str) -> RunRecord | None:
    """One run."""
    return db.one(select(runs).where(runs.c.run == run), RunRecord)


def listed(db: Database, fleet: str = "") -> list[RunRecord]:
    """The runs of a fleet (or all), newest first."""
    query = select(runs).order_by(runs.c.created_at.desc(), runs.c.run.desc())
    return db.find(query.where(runs.c.fleet == fleet) if fleet else query, RunRecord)


def record_round(db: Database, record: RoundRecord) -> None:
    """Store a completed round; a round repeated after a resume replaces its row, and their seconds add up."""
    with db.writing() as connection:  # Prometheus' counters never decrease
        earlier = select(rounds.c.seconds).where(rounds.c.run == record.run, rounds.c.round == record.round)
        seconds = record.seconds + (connection.execute(earlier).scalar() or 0.0)
        row = {**msgspec.to_builtins(record), "seconds": seconds, "ended_at": record.ended_at or now()}
        db.upsert(connection, rounds, [row])


def record_sum(db: Database, run: str, bytes: int) -> None:
    """Store what devices sent for the run's sum of class statistics; one repeated after a resume replaces it."""
    db.change(update(runs).where(runs.c.run == run).values(sums_bytes=bytes))


def traffic(db: Database, run: RunRecord) -> RunTraffic:
    """What devices received and sent for a run until its end, from the reports that were accepted."""
    report = reports.c
    mine = report.run == run.run
    if run.ended_at:  # a later fit on one of its releases is not part of it
        mine &= report.received_at <= run.ended_at
    query = select(report.round, func.sum(report.bytes_down), func.sum(report.bytes_up)).where(mine)
    rounds = {round: (down, up) for round, down, up in db.rows(query.group_by(report.round))}
    down, up = (sum(pair[place] for pair in rounds.values()) for place in (0, 1))
    return RunTraffic(down, up + run.sums_bytes, rounds)


def count_verdict(db: Database, fleet: str, outcome: str, named: int) -> None:
    """Count a round by its outcome of the round gate, and the devices that it named; a round repeated after a resume counts again."""
    counted = {"fleet": fleet, "outcome": outcome}
    counts = verdict_counts.c
    with db.writing() as connection:
        db.insert_new(connection, verdict_counts, {**counted, "rounds": 0, "named": 0})
        connection.execute(
            update(verdict_counts)
            .filter_by(**counted)
            .values(rounds=counts.rounds + 1, named=counts.named + named)
        )


def rounds_of(db: Database, run: str) -> list[RoundRecord]:
    """The completed rounds of a run, in order."""
    return db.find(select(rounds).where(rounds.c.run == run).order_by(rounds.c.round), RoundRecord)


def add_requests(db: Database, records: Iterable[RequestRecord]) -> None:
    """Store requests to devices."""
    at = now()
    db.put(requests, [{**msgspec.to_builtins(record), "requested_at": at} for record in records])


def settle_requests(
    db: Database, fleet: str, id: str, state: RequestState, reason: str = "", *, device: str | None = None
) -> int:
    """End the queued requests `id` of one device or of all; return their number."""
    queued = [requests.c.fleet == fleet, requests.c.id == id, requests.c.state == "queued"]
    if device is not None:
        queued.append(requests.c.device == device)
    return db.change(update(requests).where(*queued).values(state=state, reason=reason, ended_at=now()))


def requests_of(db: Database, run: str, round: int | None = None) -> list[RequestRecord]:
    """The requests of a run, or of one of its rounds."""
    query = (
        select(requests)
        .where(requests.c.run == run)
        .order_by(requests.c.round, requests.c.requested_at, requests.c.device)
    )
    return db.find(query if round is None else query.where(requests.c.round == round), RequestRecord)


def unmeasured(db: Database, run: str) -> str:
    """Why no device could evaluate or personalise in a run, with the devices' reasons; "" where one could, or none was requested to."""
    requests = [request for request in requests_of(db, run) if request.mode in MEASURING]
    failures = []
    for mode in MEASURING:
        ended = [request for request in requests if request.mode == mode]
        if ended and not any(request.state == "succeeded" for request in ended):
            failures.append(f"no full device could {mode}: {_reasons(ended)}")
    return "; ".join(failures)


def _running(run: str) -> Update:
    return update(runs).where(runs.c.run == run, runs.c.state == "running")


def _reasons(failed: Iterable[RequestRecord]) -> str:
    """Each reason with the devices that gave it."""
    pairs = sorted({(request.reason or request.state, request.device) for request in failed})
    parts = []
    for reason, group in groupby(pairs, key=lambda pair: pair[0]):
        names = [device for _, device in group]
        parts.append(f"{reason} ({', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''})")
    return ", ".join(parts)
