"""A round request: sent to a cohort, and completed by reports and their chunks.

A report and its blob's chunks may arrive in any order, twice or incomplete; an update counts once, when it is complete and valid. The
memory that a device can occupy is bounded by the size of a valid update. No IO here: the inbox passes packets in and sends the verdicts.
"""

import queue
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from edge_fl.blob import Assembly
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.learn.tree import Parts
from edge_fl.wire.messages import Mode, Report
from edge_fl_server.mqtt.updates.validation import RejectedError, Validator

REPORT_KINDS: dict[Mode, str] = {
    "train": "update",
    "personalise": "personal",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "serve": "head",
}
MIN_CHUNK_BYTES = 1024  # size at which an empty chunk is counted, so that the number of chunks is bounded


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
