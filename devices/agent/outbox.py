"""The outbox: reports that the server has not acknowledged yet. One leaves it by an acknowledgement or at its deadline, never otherwise.

Pure functions over tuples; what survives a restart is written by the store.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

from msgspec import Struct

from edge_fl.wire.messages import Report


class Parcel(Struct, frozen=True):
    """A report and where it goes; `deadline_s` is how long, in seconds from now or from the next start, it is worth sending."""

    run_id: str
    round: int
    report: Report
    deadline_s: float


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A parcel in the outbox: worth sending until `due_s`, to be sent (again) at `next_s`, sent `sent` times so far."""

    parcel: Parcel
    due_s: float
    next_s: float
    sent: int = 0

    @property
    def id(self) -> str:
        return self.parcel.report.id


Outbox = tuple[OutboxEntry, ...]


def put(outbox: Outbox, parcel: Parcel, now_s: float) -> Outbox:
    """With `parcel`, to be sent at once. A parcel of the same id that waits already stays as it is."""
    if find(outbox, parcel.report.id):
        return outbox
    return (*outbox, OutboxEntry(parcel, now_s + parcel.deadline_s, now_s))


def find(outbox: Outbox, id: str) -> OutboxEntry | None:
    """The parcel `id`, if it waits here."""
    return next((waiting for waiting in outbox if waiting.id == id), None)


def drop(outbox: Outbox, id: str) -> Outbox:
    """Without the parcel `id`."""
    return tuple(waiting for waiting in outbox if waiting.id != id)


def overdue(outbox: Outbox, now_s: float) -> Outbox:
    """Those past their deadline."""
    return tuple(waiting for waiting in outbox if waiting.due_s <= now_s)


def again(outbox: Outbox, at_s: float, *, grace_s: float = 0.0) -> Outbox:
    """All of them to be sent at `at_s`, and worth sending for `grace_s` after it."""
    return tuple(
        replace(waiting, next_s=at_s, due_s=max(waiting.due_s, at_s + grace_s)) for waiting in outbox
    )


def after_sending(waiting: OutboxEntry, now_s: float, interval_s: float, bytes_per_s: float) -> OutboxEntry:
    """Sent now; next after `interval_s`, longer for a large blob, spread by a quarter so that no fleet speaks in chorus."""
    blob = waiting.parcel.report.blob
    pause = interval_s + (blob.bytes / bytes_per_s if blob else 0.0)
    factor = 0.75 + 0.5 * jitter(waiting.parcel.report.boot, waiting.id, waiting.sent)
    return replace(waiting, sent=waiting.sent + 1, next_s=now_s + pause * factor)


def jitter(*what: object) -> float:
    """A number in [0, 1) that is the same for the same arguments: different devices spread, tests repeat."""
    return zlib.crc32("\x1f".join(map(str, what)).encode()) / 2**32
