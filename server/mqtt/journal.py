"""What a running server writes down in the registry: who said what about itself, which reports count, which do not, and why.

A report is in the registry before its device is told that it counts, so that it never counts twice, also after a restart. What devices
say about themselves is written in batches by a thread of its own, which also learns whom somebody else has put in quarantine or revoked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from edge_fl.errors import ConfigError, EdgeFLError
from edge_fl.wire.messages import Mode, Report
from server.registry import Database, devices, reports, runs
from server.registry.records import DeviceRecord, Rejection, RequestRecord, RequestState

log = logging.getLogger(__name__)

EVERY_S = 0.5
SEQUENCES_PER_EPOCH = 2**32
HARMLESS = frozenset({"stale_round", "not_in_cohort", "unknown_release", "extractor", "malformed"})
"""Reasons that are written down and lead to no quarantine: honest devices give them too, or what came could not even be read."""


class Journal:
    """The registry of one fleet, from any thread; without a database, one in memory.

    After `quarantine_after` reports that nobody honest sends (0: never) a device is in quarantine: nothing it sends counts any more.
    `denied` is the file beside the server's identity that names whose certificates were revoked: a session that is older than the
    revocation may live on, and is not heard.
    """

    def __init__(
        self,
        db: Database | None = None,
        fleet: str = "main",
        *,
        quarantine_after: int = 3,
        denied: Path | None = None,
    ) -> None:
        self.db, self.fleet = db or Database.open(), fleet
        self._quarantine_after = quarantine_after
        self._denied = denied
        self._barred = self._read_barred()
        self._heard: dict[str, DeviceRecord] = {}
        self._first = self._sequence = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="edge-fl-journal", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(10.0)
        self._catch_up()
        # Those alone that were heard here: another server may have taken the fleet over.
        self._silence(range(self._first, self._sequence + 1))

    def begin(self, epoch: int) -> None:
        """Numbers what is heard from now on, above all that servers before this one have heard.

        What came in between the connection and this call has waited for its number. Devices of which those servers said that they are
        there, and which have not spoken since, may have left while nobody listened.
        """
        with self._lock:
            self._first = self._sequence = epoch * SEQUENCES_PER_EPOCH
            waiting = frozenset(self._heard)
            for record in self._heard.values():
                self._note(record)
        self._silence(but=waiting)

    def barred(self, device: str) -> str:
        """Why nothing that a device sends counts: "quarantined", "revoked", or "" when it does."""
        return self._barred.get(device, "")

    def heard(self, record: DeviceRecord) -> None:
        """A device said something about itself; written soon after `begin`, or at the end."""
        with self._lock:
            self._note(record)

    def counted(self, device: str, id: str) -> bool:
        """Whether the report `id` of a device has been counted."""
        return reports.is_accepted(self.db, self.fleet, device, id)

    def accept(self, device: str, run: str, round: int, report: Report) -> None:
        """A report counts, and its task is over. Raises RunError when that cannot be written: then nobody is told that it does."""
        reports.accept(self.db, reports.record_of(self.fleet, device, run, round, report))
        self.settle(report.id, "failed" if report.error else "succeeded", report.error, device=device)

    def reject(self, device: str, run: str, round: int, id: str, reason: str, detail: str = "") -> None:
        """A report does not count; enough of them, and nothing of the device does."""
        after = 0 if reason in HARMLESS else self._quarantine_after
        rejection = Rejection(self.fleet, device, id, run, round, reason, detail[:2000])
        if why := reports.reject(self.db, rejection, quarantine_after=after):
            self._barred = {**self._barred, device: "quarantined"}
            log.warning("%s: in quarantine from now on: %s", device, why, extra={"device": device})
        if reason not in HARMLESS:
            self.settle(id, "rejected", reason, device=device)

    def quarantine(self, device: str, why: str) -> None:
        """From now on nothing that the device sends counts."""
        devices.quarantine(self.db, self.fleet, device, why)
        self._barred = {**self._barred, device: "quarantined"}
        log.error("%s: in quarantine from now on: %s", device, why, extra={"device": device})

    def ask(self, cohort: Iterable[str], run: str, round: int, mode: Mode, id: str) -> None:
        """Devices are asked for something."""
        runs.add_requests(self.db, [RequestRecord(self.fleet, device, id, run, round, mode) for device in cohort])

    def settle(self, id: str, state: RequestState, reason: str = "", *, device: str | None = None) -> None:
        """The task `id` of one device is over, or all that are still open under it."""
        runs.settle_requests(self.db, self.fleet, id, state, reason, device=device)

    def _note(self, record: DeviceRecord) -> None:
        self._sequence += 1
        self._heard[record.device] = replace(record, seen_sequence=self._sequence)

    def _silence(self, heard: range = devices.ANY_SEQUENCE, but: Container[str] = ()) -> None:
        try:
            devices.mark_unknown(self.db, self.fleet, heard, but)
        except EdgeFLError as error:
            log.warning("%s; the registry goes on naming devices as they were heard last", error)

    def _read_barred(self) -> dict[str, str]:
        revoked = _names(self._denied) if self._denied else []
        return {**devices.blocked(self.db, self.fleet), **dict.fromkeys(revoked, "revoked")}

    def _keep_up(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._catch_up()

    def _catch_up(self) -> None:
        heard: dict[str, DeviceRecord] = {}
        with self._lock:
            if self._first or self._closing.is_set():
                heard, self._heard = self._heard, heard
        try:
            if heard:
                devices.record(self.db, heard.values())
            self._barred = self._read_barred()
        except EdgeFLError as error:
            log.warning("%s", error)
            with self._lock:
                self._heard = {**heard, **self._heard}


def _names(path: Path) -> list[str]:
    """One name per line; none where there is no such file."""
    try:
        return path.read_text().split()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {error}; expected the names that were revoked; those known before stay so"
        ) from error
