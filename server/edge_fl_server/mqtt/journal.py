"""A running server's access to the registry: device states, requests, accepted and rejected reports.

An accepted report is stored before it is acknowledged, so that it never counts twice, also after a restart. Device states are written in
batches by a separate thread, which also reads the devices that other processes have quarantined or revoked.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from edge_fl import threads
from edge_fl.errors import ConfigError, EdgeFLError
from edge_fl.failures import Failure
from edge_fl.files.paths import text
from edge_fl.fleet import actions, tags
from edge_fl.logs import LogLimit, Outage
from edge_fl.wire.messages import Mode, Report
from edge_fl.wire.topics import role_of
from edge_fl_server.mqtt.device_packets import one_line
from edge_fl_server.registry import (
    Database,
    audit,
    fleets,
    registered_devices,
    registered_reports,
    registered_tags,
    runs,
)
from edge_fl_server.registry.tables import DeviceRecord, RejectionRecord, RequestRecord, RequestState

log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.5
SEQUENCES_PER_EPOCH = 2**32
NEWEST = 10


class _Benign:
    """A device's rejections of one failure word, not counting towards quarantine, since they were last stored: the newest, and how many."""

    def __init__(self) -> None:
        self.newest: deque[RejectionRecord] = deque(maxlen=NEWEST)
        self.count = 0

    def add(self, rejections: Iterable[RejectionRecord], count: int) -> None:
        self.newest.extend(rejections)
        self.count += count

    def store(self, db: Database) -> None:
        while self.newest:
            count = self.count - len(self.newest) + 1  # the first one counts for those that are not kept
            registered_reports.reject(db, self.newest[0], count=count)
            self.newest.popleft()
            self.count -= count


class Journal:
    """The registry of one fleet, from any thread; in memory without a database.

    A device is quarantined after `quarantine_after` reports that a correct device never sends (0: never); its reports do not count
    then. `denied` is the file with the names of revoked devices next to the server's identity, which `fleet revoke` writes; the
    registry repeats it for lists, the dashboard and workers, like the tags that `fleet enrol` writes next to it. Sessions older than
    the revocation may still be open, and their reports do not count either. `lines` limits what each device can cause in the log.
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
        self.lines = LogLimit()
        self._excess_lines = LogLimit()  # a flood uses up the other ones
        self._quarantine_after = quarantine_after
        self._denied = denied
        self.on_removed: Callable[[str], None] = lambda device: None
        self.on_written: list[Callable[[], None]] = []
        self._tags_file = denied.with_name(tags.TAGS_FILE) if denied else None
        self._enrolled: dict[str, dict[str, str]] = {}
        self._actions_size = 0
        self._blocked = self._read_blocked()
        self._pending: dict[str, DeviceRecord] = {}
        self._excess: list[tuple[str, int, str]] = []
        self._restarts: list[tuple[str, str]] = []  # device and boot id
        self._benign: dict[tuple[str, str], _Benign] = {}  # by device and reason
        self._first = self._sequence = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.on_failure: Callable[[str], None] = lambda reason: None
        self._thread = threads.once(self._run, "edge-fl-journal")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(10.0)
        with Outage(log, f"fleet {self.fleet!r}").logged("the newest device states are lost"):
            self._write_pending()
        # Only devices last seen by this server: another one may have taken the fleet over.
        self._mark_unknown(range(self._first, self._sequence + 1))
        if self._first:
            try:
                fleets.end(self.db, self.fleet, self._first)
            except EdgeFLError as error:
                log.warning("%s; the registry shows this server for %g s more", error, fleets.SILENT_S)

    def begin(self, epoch: int) -> None:
        """Number device states from now on, above those of all earlier servers.

        States received between the connection and this call have waited for their numbers. Devices that were present under an earlier
        server and have sent nothing since become "unknown", because they may have left while no server was online.
        """
        with self._lock:
            # Not below those in the registry: an unreadable retained state makes the epoch start anew.
            last = max(
                (known.seen_sequence for known in registered_devices.listed(self.db, self.fleet)), default=0
            )
            self._first = self._sequence = max(epoch * SEQUENCES_PER_EPOCH, last + 1)
            for record in self._pending.values():
                self._enqueue(record)
        self._mark_unknown(range(self._first))
        fleets.begin(self.db, self.fleet, self._first)

    def blocked(self, device: str) -> str:
        """Why the reports of a device do not count: "removed", "quarantined", "revoked", or "" if they do."""
        return self._blocked.get(device, "")

    def record_device(self, record: DeviceRecord) -> None:
        """Store the state of a device, soon after `begin` or at the end."""
        with self._lock:
            self._enqueue(record)

    def record_restart(self, device: str, boot: str) -> None:
        """Store soon that a device runs another process of its agent, and that this was not planned."""
        with self._lock:
            self._restarts.append((device, boot))

    def record_excess(self, device: str, dropped: int, description: str) -> None:
        """Store soon that messages of a device were dropped above the rate limit; this counts as one rejection."""
        with self._lock:
            self._excess.append((device, dropped, description))

    def is_accepted(self, device: str, id: str) -> bool:
        """Whether the report `id` of a device was accepted before."""
        return registered_reports.is_accepted(self.db, self.fleet, device, id)

    def accept(self, device: str, run: str, round: int, report: Report) -> None:
        """Store an accepted report and end its request. Raises RunError if that fails: the report must not be acknowledged then."""
        registered_reports.accept(
            self.db, registered_reports.record_of(self.fleet, device, run, round, report)
        )
        self.settle(report.id, "failed" if report.error else "succeeded", report.error, device=device)

    def record_screening(
        self, run: str, round: int, scores: Mapping[str, float], outliers: Mapping[str, str]
    ) -> None:
        """Store the outlier scores of a round's updates, and each outlier's reason as a rejection that leads to quarantine."""
        registered_devices.score(self.db, self.fleet, scores)
        for device, why in outliers.items():
            self._reject(RejectionRecord(self.fleet, device, "", run, round, Failure.OUTLIER, why))

    def reject(self, device: str, run: str, round: int, id: str, reason: str, detail: str = "") -> None:
        """Store a rejected report; quarantine the device after too many.

        Those that do not count towards quarantine are stored soon, of many the newest and the number: they cost the caller nothing.
        """
        rejection = RejectionRecord(self.fleet, device, id, run, round, reason, one_line(detail)[:2000])
        word = Failure.of(reason)
        if word and word.rejection and not word.rejection.counts:
            with self._lock:
                self._benign.setdefault((device, reason), _Benign()).add([rejection], 1)
            return
        self._reject(rejection)
        self.settle(id, "rejected", reason, device=device)

    def quarantine(self, device: str, why: str) -> None:
        """Quarantine a device: its reports do not count from now on."""
        registered_devices.quarantine(self.db, self.fleet, device, why)
        self._blocked = {**self._blocked, device: "quarantined"}
        log.error("%s: quarantined: %s", device, why, extra={"device": device})

    def add_requests(self, cohort: Iterable[str], run: str, round: int, mode: Mode, id: str) -> None:
        """Store the requests to the devices of a cohort."""
        runs.add_requests(
            self.db, [RequestRecord(self.fleet, device, id, run, round, mode) for device in cohort]
        )

    def settle(self, id: str, state: RequestState, reason: str = "", *, device: str | None = None) -> None:
        """End the request `id` of one device, or of all devices where it is still open."""
        runs.settle_requests(self.db, self.fleet, id, state, reason, device=device)

    def _reject(self, rejection: RejectionRecord) -> None:
        if why := registered_reports.reject(self.db, rejection, quarantine_after=self._quarantine_after):
            device = rejection.device
            self._blocked = {**self._blocked, device: "quarantined"}
            log.warning("%s: quarantined: %s", device, why, extra={"device": device})

    def _enqueue(self, record: DeviceRecord) -> None:
        self._sequence += 1
        self._pending[record.device] = replace(record, seen_sequence=self._sequence)

    def _mark_unknown(self, sequences: range) -> None:
        try:
            registered_devices.mark_unknown(self.db, self.fleet, sequences)
        except EdgeFLError as error:
            log.warning("%s; the registry still shows the last known states of devices", error)

    def _read_blocked(self) -> dict[str, str]:
        blocked = registered_devices.blocked(self.db, self.fleet)
        if self._denied:
            revoked = {name for name in _read_names(self._denied) if role_of(name) == "device"}
            if revoked != {device for device, why in blocked.items() if why == "revoked"}:
                registered_devices.set_revoked(self.db, self.fleet, revoked)
                blocked = registered_devices.blocked(self.db, self.fleet)
        return blocked

    def _read_tags(self) -> None:
        """Add the tags of newly enrolled devices to the registry."""
        given = tags.read(self._tags_file) if self._tags_file else {}
        if given != self._enrolled:
            registered_tags.enrolled(self.db, self.fleet, given)
            self._enrolled = given

    def _read_actions(self) -> None:
        """Add what people did with certificates to the audit log."""
        if self._denied is None:
            return
        path = self._denied.with_name(actions.ACTIONS_FILE)
        size = path.stat().st_size if path.exists() else 0
        if size != self._actions_size:
            audit.enter(self.db, self.fleet, actions.read(path))
            self._actions_size = size

    def _run(self) -> None:
        try:
            beat_s, outage = time.monotonic(), Outage(log, f"fleet {self.fleet!r}")
            while not self._closing.wait(WRITE_INTERVAL_S):
                with outage.logged("device states are kept until it works again"):
                    self._write_pending()
                    for handler in self.on_written:
                        handler()
                    if self._first and time.monotonic() - beat_s > fleets.BEAT_S:
                        beat_s = time.monotonic()
                        fleets.beat(self.db, self.fleet, self._first)
        except Exception as error:
            log.exception("journal: device states are no longer stored")
            self.on_failure(f"device states cannot be stored in the registry: {error}")

    def _write_pending(self) -> None:
        records: dict[str, DeviceRecord] = {}
        with self._lock:
            excess, self._excess = self._excess, []
            restarts, self._restarts = self._restarts, []
            benign, self._benign = self._benign, {}
            if self._first or self._closing.is_set():
                records, self._pending = self._pending, records
        try:
            if records:
                registered_devices.record(self.db, records.values())
            if restarts:
                registered_devices.record_restarts(self.db, self.fleet, restarts)
                restarts = []
            while excess:
                self._write_excess(*excess[0])
                del excess[0]
            for key, group in list(benign.items()):
                group.store(self.db)
                del benign[key]
            before, self._blocked = self._blocked, self._read_blocked()
            for device, why in self._blocked.items():
                if why == "removed" and before.get(device) != why:
                    self.on_removed(device)
            self._read_tags()
            self._read_actions()
        except EdgeFLError:
            with self._lock:
                self._pending = {**records, **self._pending}
                self._excess = [*excess, *self._excess]
                self._restarts = [*restarts, *self._restarts]
                for key, later in self._benign.items():
                    benign.setdefault(key, _Benign()).add(later.newest, later.count)
                self._benign = benign
            raise

    def _write_excess(self, device: str, dropped: int, description: str) -> None:
        self._excess_lines.write(log, logging.WARNING, device, "%s: %s", one_line(device), description)
        registered_devices.count_dropped(self.db, self.fleet, device, dropped)
        if not self.blocked(device):
            self._reject(RejectionRecord(self.fleet, device, "", "", 0, Failure.FLOODING, description))


def _read_names(path: Path) -> list[str]:
    """Names separated by white space; empty without the file."""
    try:
        return path.read_text().split()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{text(path)}: {error}; expected the names of revoked devices",
            consequence="the names read before stay revoked",
        ) from error
