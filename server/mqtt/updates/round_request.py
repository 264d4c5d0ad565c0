"""One exchange: the question that a cohort was asked, and the answers as they come together from reports and chunks.

A report and its blob's chunks may arrive in any order, twice, or in part; an answer counts once, when it is whole and has been judged.
What a device can make the server hold is bounded by what an honest answer would need. No IO here: the inbox brings packets and sends the
verdicts.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from edge_fl.errors import ArtefactError
from edge_fl.learn.tree import Parts
from edge_fl.wire.blob import Assembly
from edge_fl.wire.messages import Mode, Report
from server.mqtt.updates.validation import Expected, Flaw, RefusedError, check_report, parts_of

KINDS: dict[Mode, str] = {
    "train": "update",
    "personalise": "personal",
    "evaluate": "evaluation",
    "serve": "head",
}
SMALLEST_CHUNK_BYTES = 1024  # what an empty chunk is counted as, so that their number is bounded too


@dataclass(frozen=True)
class Answer:
    """What became of one member: its report with its parts, or why nothing of it counts (`refusal`, or `report.error`)."""

    device: str
    report: Report
    parts: Parts = field(default_factory=dict)
    refusal: str = ""

    @property
    def counts(self) -> bool:
        return not self.refusal and not self.report.error


@dataclass(frozen=True)
class Verdict:
    """What a device is told about its report `id`."""

    id: str
    status: Literal["accepted", "duplicate", "rejected"]
    reason: str = ""
    report: Report | None = None  # that was judged, where it is not at hand
    detail: str = ""


@dataclass
class _Upload:
    """One member's answer in the making: chunks that came before their report, then report and assembly."""

    early: dict[int, bytes] = field(default_factory=dict)
    early_bytes: int = 0
    report: Report | None = None
    assembly: Assembly | None = None


class RoundRequest:
    """One question to `cohort`, known by `id`; answers go to `answers`, a queue of its own or one that several share.

    `samples` tells what a device said to have (0: unknown).
    """

    def __init__(
        self,
        id: str,
        run_id: str,
        round: int,
        mode: Mode,
        cohort: Collection[str],
        expected: Expected,
        samples: Callable[[str], int] = lambda device: 0,
        flaw: Flaw = lambda parts, report: "",
        answers: queue.SimpleQueue[Answer] | None = None,
    ) -> None:
        self.id, self.run_id, self.round, self.mode = id, run_id, round, mode
        self.cohort = frozenset(cohort)
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue() if answers is None else answers
        self.settled: dict[str, Verdict] = {}
        self._expected, self._samples, self._flaw = expected, samples, flaw
        self._uploads: dict[str, _Upload] = {}

    def take_report(self, device: str, report: Report) -> Verdict | None:
        """The verdict, or None while chunks are missing."""
        if known := self.settled.get(device):
            return replace(known, status="duplicate") if known.status == "accepted" else known
        try:
            check_report(report, KINDS[self.mode], self._expected, self._samples(device))
        except RefusedError as refusal:
            return self._settle(Answer(device, report, refusal=str(refusal)), refusal.reason)
        if report.blob is None or report.error:
            return self._settle(Answer(device, report))
        upload = self._uploads.setdefault(device, _Upload())
        if upload.assembly is None or upload.assembly.blob != report.blob:
            upload.assembly = Assembly(report.blob)
        upload.report = report
        early, upload.early, upload.early_bytes = upload.early, {}, 0
        for index, payload in early.items():
            _add(upload.assembly, index, payload)
        return self._judge(device, upload)

    def take_chunk(self, device: str, index: int, payload: bytes) -> Verdict | None:
        """The verdict, if this was the last chunk of a report that is here."""
        if device in self.settled:
            return None
        upload = self._uploads.setdefault(device, _Upload())
        if upload.assembly is None:
            self._keep(upload, index, payload)
            return None
        _add(upload.assembly, index, payload)
        return self._judge(device, upload)

    def _keep(self, upload: _Upload, index: int, payload: bytes) -> None:
        """A chunk that came before its report; what an honest upload would not need is dropped."""
        if index not in upload.early and upload.early_bytes + len(payload) <= self._expected.max_bytes:
            upload.early[index] = payload
            upload.early_bytes += max(len(payload), SMALLEST_CHUNK_BYTES)

    def _judge(self, device: str, upload: _Upload) -> Verdict | None:
        if upload.report is None or upload.assembly is None or not upload.assembly.complete:
            return None
        try:
            parts = parts_of(upload.assembly.join(), self._expected)
            if flaw := self._flaw(parts, upload.report):
                raise RefusedError("parts", flaw)
        except RefusedError as refusal:
            return self._settle(Answer(device, upload.report, refusal=str(refusal)), refusal.reason)
        except ArtefactError as error:
            return self._settle(Answer(device, upload.report, refusal=str(error)), "blob_hash")
        return self._settle(Answer(device, upload.report, parts))

    def _settle(self, answer: Answer, reason: str = "") -> Verdict:
        status: Literal["accepted", "rejected"] = "rejected" if reason else "accepted"
        verdict = Verdict(self.id, status, reason, answer.report, answer.refusal)
        self.settled[answer.device] = verdict
        self._uploads.pop(answer.device, None)
        self.answers.put(answer)
        return verdict


def _add(assembly: Assembly, index: int, payload: bytes) -> None:
    try:
        assembly.add(index, payload)
    except ArtefactError:
        pass  # it does not belong to the blob that the report describes; the right one is still missing and will be sent again
