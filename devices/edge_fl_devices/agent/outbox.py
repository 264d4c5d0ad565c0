"""The outbox: reports that are not acknowledged yet. One leaves it by its acknowledgement, at its deadline, or as a refit whose head a
later one has replaced; never otherwise.

Pure functions over tuples; the store writes what must survive a restart.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from msgspec import Struct

from edge_fl.wire.messages import Report

REFIT = "refit-"
"""How the id of a report begins whose fit the device began of its own accord."""


class Parcel(Struct, frozen=True):
    """A report and its destination. It is worth sending for `deadline_s` from now, or from the next start of the process."""

    run_id: str
    round: int
    report: Report
    deadline_s: float


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A parcel in the outbox, due for sending at `next_s`, dropped at `due_s`; sent `sent` times so far."""

    parcel: Parcel
    due_s: float
    next_s: float
    sent: int = 0

    @property
    def id(self) -> str:
        return self.parcel.report.id


Outbox = tuple[OutboxEntry, ...]


def put(outbox: Outbox, parcel: Parcel, now_s: float) -> Outbox:
    """Add `parcel`, due at once. An entry with the same id stays as it is."""
    if find(outbox, parcel.report.id):
        return outbox
    return (*outbox, OutboxEntry(parcel, now_s + parcel.deadline_s, now_s))


def restored(parcels: Iterable[Parcel], now_s: float) -> Outbox:
    """The outbox of a process that starts with these stored reports."""
    return functools.reduce(lambda outbox, parcel: put(outbox, parcel, now_s), parcels, ())


def find(outbox: Outbox, id: str) -> OutboxEntry | None:
    """Return the entry `id`, if there is one."""
    return next((entry for entry in outbox if entry.id == id), None)


def remove(outbox: Outbox, id: str) -> Outbox:
    """Remove the entry `id`."""
    return tuple(entry for entry in outbox if entry.id != id)


def superseded(outbox: Outbox, report: Report) -> tuple[str, ...]:
    """The ids of refits whose reports a new one replaces: any on a head for the same extractor; a failure replaces failures only.

    So a device that fits often without a broker keeps one report, not one of each fit.
    """
    refits = [entry.parcel.report for entry in outbox if entry.id.startswith(REFIT) and entry.id != report.id]
    if report.error:
        return tuple(refit.id for refit in refits if refit.error)
    return tuple(refit.id for refit in refits if refit.error or refit.extractor == report.extractor)


def reconnected(outbox: Outbox, now_s: float) -> Outbox:
    """Send all entries at once. The time of one on a head, which no round waits for, begins anew: it does not run without a broker."""
    return tuple(
        replace(entry, next_s=now_s, due_s=now_s + entry.parcel.deadline_s if waits(entry) else entry.due_s)
        for entry in outbox
    )


def waits(entry: OutboxEntry) -> bool:
    """Whether a report waits for the next connection, however long that takes."""
    return entry.parcel.report.kind == "head"


def reschedule(outbox: Outbox, at_s: float, *, grace_s: float = 0.0) -> Outbox:
    """Send all entries at `at_s`, and keep them for `grace_s` after it at least."""
    return tuple(replace(entry, next_s=at_s, due_s=max(entry.due_s, at_s + grace_s)) for entry in outbox)


def after_sending(entry: OutboxEntry, now_s: float, interval_s: float, bytes_per_s: float) -> OutboxEntry:
    """Schedule the next attempt after `interval_s`, longer for a large blob, with a jitter of a quarter."""
    blob = entry.parcel.report.blob
    pause = interval_s + (blob.bytes / bytes_per_s if blob else 0.0)
    factor = 0.75 + 0.5 * jitter(entry.parcel.report.boot, entry.id, entry.sent)
    return replace(entry, sent=entry.sent + 1, next_s=now_s + pause * factor)


def jitter(*what: object) -> float:
    """A number in [0, 1) that depends on the arguments only: it differs between devices and is repeatable in tests."""
    return zlib.crc32("\x1f".join(map(str, what)).encode()) / 2**32
