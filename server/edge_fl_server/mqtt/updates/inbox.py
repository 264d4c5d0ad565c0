"""The inbox: every report gets exactly one acknowledgement: accepted, duplicate, or rejected with a reason.

Reports on an open round request go to it; reports of fitted heads go to the roll-out of their release; all others are stale. The topic
determines the sender, the run and the round of a report. A report and its blob's chunks may arrive in any order, twice or incomplete; an
update counts once, when it is complete and valid. The memory that a device can occupy is bounded by the size of a valid update.

Head-only devices send head updates with their reports: only the parts that the release requests, so that their samples weigh in those
parts' sums and never in the extractor's. They are validated like other updates and kept until the next aggregation; late ones join the
next, those on an earlier release are dropped. A rejected head update does not reject its report.
"""

import logging
import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from edge_fl.blob import Assembly
from edge_fl.config import CompressionConfig, PrivacyConfig
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods.contract.method import Method
from edge_fl.release.manifests import Manifest
from edge_fl.wire.egress import HEAD_NUMBERS
from edge_fl.wire.messages import Ack, Mode, Report
from edge_fl_server.mqtt.connection import ReceivedMessage, ServerConnection
from edge_fl_server.mqtt.devices.roster import Roster
from edge_fl_server.mqtt.updates.validation import (
    STATISTICS,
    Expected,
    RejectedError,
    UpdateTerms,
    Validator,
    expected_of,
    require_statistic,
)

REPORT_KINDS: dict[Mode, str] = {
    "train": "update",
    "personalise": "personal",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "serve": "head",
}
MIN_CHUNK_BYTES = 1024  # size at which an empty chunk is counted, so that the number of chunks is bounded
STALE = "upload_stale"
HEADER_BYTES = 64 * 1024
log = logging.getLogger(__name__)
ACK_EXPIRY_S = 3600


@dataclass(frozen=True)
class Response:
    """The result of one member of the cohort: its report and parts, or why they do not count (`rejection` or `report.error`)."""

    device: str
    report: Report
    parts: Parts = field(default_factory=dict)
    rejection: str = ""

    @property
    def counts(self) -> bool:
        return not self.rejection and not self.report.error


@dataclass(frozen=True)
class UpdateVerdict:
    """The acknowledgement of the report `id`. `report`: the validated report if a chunk completed it."""

    id: str
    status: Literal["accepted", "duplicate", "rejected"]
    reason: str = ""
    report: Report | None = None
    detail: str = ""


@dataclass
class _Upload:
    """An incomplete update: chunks that arrived before their report, then report and assembly."""

    early: dict[int, bytes] = field(default_factory=dict)
    early_bytes: int = 0
    report: Report | None = None
    assembly: Assembly | None = None


@dataclass(eq=False)
class RoundRequest:
    """One request to `cohort`, identified by `id`; responses go to `responses`, its own queue or one shared by several requests."""

    id: str
    run_id: str
    round: int
    mode: Mode
    cohort: Collection[str]
    validator: Validator
    responses: queue.SimpleQueue[Response] = field(default_factory=queue.SimpleQueue)
    verdicts: dict[str, UpdateVerdict] = field(default_factory=dict)
    _uploads: dict[str, _Upload] = field(default_factory=dict)

    def take_report(self, device: str, report: Report) -> UpdateVerdict | None:
        """Take a report -> the verdict; None while chunks are missing."""
        if verdict := self.verdicts.get(device):
            return replace(verdict, status="duplicate") if verdict.status == "accepted" else verdict
        try:
            self.validator.check_report(report, REPORT_KINDS[self.mode], device)
        except RejectedError as error:
            return self._reject(device, report, error)
        if report.blob is None or report.error:
            return self._accept(Response(device, report))
        upload = self._uploads.setdefault(device, _Upload())
        if upload.assembly is None or upload.assembly.blob != report.blob:
            upload.assembly = Assembly(report.blob)
        upload.report = report
        early, upload.early, upload.early_bytes = upload.early, {}, 0
        for index, payload in early.items():
            _add_chunk(upload.assembly, index, payload)
        return self._complete(device, upload)

    def take_chunk(self, device: str, index: int, payload: bytes) -> UpdateVerdict | None:
        """Take a chunk -> the verdict if it completed the update."""
        if device in self.verdicts:
            return None
        upload = self._uploads.setdefault(device, _Upload())
        if upload.assembly is None:
            self._keep_early_chunk(upload, index, payload)
            return None
        _add_chunk(upload.assembly, index, payload)
        return self._complete(device, upload)

    def _keep_early_chunk(self, upload: _Upload, index: int, payload: bytes) -> None:
        """Keep a chunk that arrived before its report, up to the size of a valid update."""
        if (
            index not in upload.early
            and upload.early_bytes + len(payload) <= self.validator.expected.max_bytes
        ):
            upload.early[index] = payload
            upload.early_bytes += max(len(payload), MIN_CHUNK_BYTES)

    def _complete(self, device: str, upload: _Upload) -> UpdateVerdict | None:
        if upload.report is None or upload.assembly is None or not upload.assembly.complete:
            return None
        try:
            parts = self.validator.parts(upload.assembly.join(), upload.report)
        except RejectedError as error:
            return self._reject(device, upload.report, error)
        except ArtefactError as error:
            return self._reject(device, upload.report, RejectedError(Failure.BLOB_HASH, error.message))
        return self._accept(Response(device, upload.report, parts))

    def _accept(self, response: Response) -> UpdateVerdict:
        return self._conclude(response, UpdateVerdict(self.id, "accepted", report=response.report))

    def _reject(self, device: str, report: Report, error: RejectedError) -> UpdateVerdict:
        verdict = UpdateVerdict(self.id, "rejected", error.reason, report, error.message)
        return self._conclude(Response(device, report, rejection=error.message), verdict)

    def _conclude(self, response: Response, verdict: UpdateVerdict) -> UpdateVerdict:
        self.verdicts[response.device] = verdict
        self._uploads.pop(response.device, None)
        self.responses.put(response)
        return verdict


def _add_chunk(assembly: Assembly, index: int, payload: bytes) -> None:
    try:
        assembly.add(index, payload)
    except ArtefactError:
        pass  # not a chunk of the reported blob; the right one is still missing and is sent again


class HeadUpdates:
    """Head updates on the current release. Reports and chunks arrive on the receive thread, `take` is called by the round loop.

    `on_report` receives each report whose head update has been validated, accepted or not.
    """

    def __init__(
        self, roster: Roster, on_report: Callable[[str, Report], None], torch_device: str = "cpu"
    ) -> None:
        self._roster, self._on_report, self._torch_device = roster, on_report, torch_device
        self._round_request: RoundRequest | None = None
        self._waiting: dict[str, Update] = {}
        self._lock = threading.Lock()

    def open(self, id: str, manifest: Manifest, method: Method) -> None:
        """Take head updates with the report `id` on this release from now on, and no longer those on earlier ones."""
        validator = Validator(
            expected_head_update(manifest, method), partial(_check_statistics, manifest), self._roster.samples
        )
        with self._lock:
            self._round_request = RoundRequest(
                id, manifest.run_id, manifest.round, "serve", cohort=(), validator=validator
            )

    def is_open(self, id: str) -> bool:
        """Whether chunks of the report `id` are taken."""
        return self._round_request is not None and self._round_request.id == id

    @property
    def run_and_round(self) -> tuple[str, int]:
        """The run and round of the current release."""
        return (self._round_request.run_id, self._round_request.round) if self._round_request else ("", 0)

    def take_report(self, device: str, report: Report) -> UpdateVerdict | None:
        """Take a report with a blob -> the verdict; None while chunks are missing."""
        with self._lock:
            if self._round_request is not None and self.is_open(report.id):
                return self._conclude(self._round_request, self._round_request.take_report(device, report))
        self._on_report(device, report)
        return UpdateVerdict(report.id, "accepted", STALE)

    def take_chunk(self, device: str, id: str, index: int, payload: bytes) -> UpdateVerdict | None:
        """Take a chunk -> the verdict if it completed a head update."""
        with self._lock:
            if self._round_request is None or not self.is_open(id) or self._roster.get(device) is None:
                return None
            return self._conclude(self._round_request, self._round_request.take_chunk(device, index, payload))

    def take(self) -> list[Update]:
        """The head updates since the last call, by ascending device; each counts once."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return [waiting[device] for device in sorted(waiting)]

    def _conclude(self, round_request: RoundRequest, verdict: UpdateVerdict | None) -> UpdateVerdict | None:
        while not round_request.responses.empty():
            self._keep(round_request.responses.get())
        if verdict and verdict.status == "rejected":
            return replace(verdict, status="accepted", reason=f"upload_{verdict.reason}")
        return verdict

    def _keep(self, response: Response) -> None:
        self._on_report(response.device, response.report)
        if response.counts and response.parts:
            parts = to_device(response.parts, self._torch_device)
            self._waiting[response.device] = Update(response.device, response.report.samples, parts)


def expected_head_update(manifest: Manifest, method: Method) -> Expected:
    """The permitted head updates on a release: the parts that it names, as full clients would send them."""
    plain = replace(
        method, compression=CompressionConfig(), privacy=PrivacyConfig()
    )  # unused by head-only devices
    expected, named = expected_of(plain, whole=False), manifest.heads.uploads.keys()
    networks = {name: signature for name, signature in expected.networks.items() if name in named}
    classes, dim = len(manifest.classes), manifest.feature_dim
    numbers = dim * dim + 3 * classes * (dim + 1)  # more than any statistic has
    max_bytes = 8 * numbers + HEADER_BYTES
    return Expected(
        networks, frozenset(named - networks.keys()), frozenset(), max_bytes, numbers=HEAD_NUMBERS
    )


def _check_statistics(manifest: Manifest, parts: Parts, report: Report) -> None:
    """Check shapes, values and sample counts of statistics. Raises RejectedError."""
    size = len(manifest.classes), manifest.feature_dim
    for part, kind in manifest.heads.uploads.items():
        if part in parts and kind in STATISTICS:
            require_statistic(part, parts[part], kind, size, report.samples)


HeadHandler = Callable[[str, Report], UpdateVerdict | None]
"""(device, report) -> verdict; None while chunks are missing."""


class Inbox:
    """Route reports and chunks. An accepted report is in the journal before it is acknowledged."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection, self.journal, self.counts = connection, connection.journal, connection.counts
        self._open: dict[str, RoundRequest] = {}
        self._lock = threading.Lock()
        self._on_head: HeadHandler = lambda device, report: None  # the device sends it again
        self._head_updates: HeadUpdates | None = None
        connection.on("rpt", self._on_report)
        connection.on("blob", self._on_chunk)

    def open(self, round_request: RoundRequest, terms: UpdateTerms) -> None:
        """Take reports on a round request from now on; `terms` are for validation in other processes."""
        with self._lock:
            self._open[round_request.id] = round_request

    def close(self, round_request: RoundRequest) -> None:
        """Reject reports on a round request as stale from now on."""
        with self._lock:
            self._open.pop(round_request.id, None)

    def stop(self) -> None:
        """Stop background work; the base class has none."""

    def on_head(self, handler: HeadHandler, head_updates: HeadUpdates) -> None:
        """Set the handlers of reports of fitted heads, and of their chunks."""
        self._on_head, self._head_updates = handler, head_updates

    def _on_report(self, received: ReceivedMessage) -> None:
        report, device = received.message, received.address.device
        if not isinstance(report, Report):
            return
        with self._lock:
            verdict = self._verdict(device, report, received.address.path)
            run, round = received.address.path
            self._record(device, verdict, report, run, int(round))
        self._acknowledge(device, verdict)

    def _verdict(self, device: str, report: Report, path: tuple[str, ...]) -> UpdateVerdict | None:
        if reason := self.journal.blocked(device):
            return UpdateVerdict(report.id, "rejected", reason)
        if self.journal.is_accepted(device, report.id):
            return UpdateVerdict(report.id, "duplicate")
        if report.kind == "head":
            return self._on_head(device, report)
        round_request = self._open.get(report.id)
        if round_request is None or path != (round_request.run_id, str(round_request.round)):
            return UpdateVerdict(report.id, "rejected", Failure.STALE_ROUND)
        if device not in round_request.cohort:
            return UpdateVerdict(report.id, "rejected", Failure.NOT_IN_COHORT)
        return round_request.take_report(device, report)

    def _on_chunk(self, received: ReceivedMessage) -> None:
        device, (id, index) = received.address.device, received.address.path
        with self._lock:
            round_request, heads, payload = self._open.get(id), self._head_updates, received.message
            run, round = "", 0
            if not isinstance(payload, bytes) or self.journal.blocked(device):
                verdict = None
            elif round_request and device in round_request.cohort:
                run, round = round_request.run_id, round_request.round
                verdict = round_request.take_chunk(device, int(index), payload)
            elif heads and heads.is_open(id):
                run, round = heads.run_and_round
                verdict = heads.take_chunk(device, id, int(index), payload)
            else:
                self.counts["stray chunk"] += 1
                verdict = None
            self._record(device, verdict, verdict.report if verdict else None, run, round)
        self._acknowledge(device, verdict)

    def _record(
        self, device: str, verdict: UpdateVerdict | None, report: Report | None, run: str, round: int
    ) -> None:
        """Count a verdict and store it in the journal, except for a blocked device."""
        if verdict is None:
            return
        self.counts[verdict.reason or verdict.status] += 1
        if verdict.status == "rejected" and not self.journal.blocked(device):
            self.journal.reject(device, run, round, verdict.id, verdict.reason, verdict.detail)
        elif verdict.status == "accepted" and report:
            self.journal.accept(device, run, round, report)

    def _acknowledge(self, device: str, verdict: UpdateVerdict | None) -> None:
        if verdict is None:
            return
        self._log(device, verdict)
        ack = Ack(verdict.id, verdict.status, verdict.reason)
        self._connection.publish(self._connection.topics.down(device, "ack"), ack, expiry_s=ACK_EXPIRY_S)

    def _log(self, device: str, verdict: UpdateVerdict) -> None:
        """Log why a report does not count, once, within the limit of its device's lines."""
        if verdict.reason:
            found = (verdict.id, device, verdict.status, verdict.detail or verdict.reason)
            self.journal.lines.write(log, logging.WARNING, device, "report %s of %s: %s, %s", *found)
