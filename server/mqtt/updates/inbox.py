"""Every report gets exactly one answer: accepted, duplicate, or rejected with a reason. Nothing counts twice, nothing counts late.

Reports on an exchange that is open go there; reports of fitted heads go to whoever released their extractor; all others are stale. Whose
report it is, and for which round, is told by its topic.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from edge_fl.wire.messages import Ack, Report
from server.mqtt.connection import Heard, ServerConnection
from server.mqtt.journal import Journal
from server.mqtt.updates.head_updates import HeadUpdates
from server.mqtt.updates.round_request import RoundRequest, Verdict
from server.mqtt.updates.validation import Terms

log = logging.getLogger(__name__)

ACK_EXPIRY_S = 3600
STALE = "stale_round"

# (device, report) -> the answer, None while chunks are missing
HeadHandler = Callable[[str, Report], Verdict | None]


class Inbox:
    """Routes reports and chunks; `counts` says how many were accepted, duplicate, or rejected for which reason.

    What counts is in the journal before its device is told so.
    """

    def __init__(self, connection: ServerConnection, journal: Journal | None = None) -> None:
        self._connection = connection
        self.journal = journal or Journal(fleet=connection.topics.fleet)
        self._open: dict[str, RoundRequest] = {}
        self._lock = threading.Lock()
        self._on_head: HeadHandler = lambda device, report: Verdict(report.id, "rejected", STALE)
        self._contributions: HeadUpdates | None = None
        self.counts: Counter[str] = Counter()
        connection.on("rpt", self._report)
        connection.on("blob", self._chunk)
        connection.on_refused(self._malformed)

    def open(self, round_request: RoundRequest, terms: Terms) -> None:
        """From now on answers to this exchange are taken; `terms` are what it judges by."""
        with self._lock:
            self._open[round_request.id] = round_request

    def close(self, round_request: RoundRequest) -> None:
        """From now on they are late."""
        with self._lock:
            self._open.pop(round_request.id, None)

    def on_head(self, handler: HeadHandler, head_updates: HeadUpdates) -> None:
        """Who takes the reports of fitted heads, and the chunks that come with them."""
        self._on_head, self._contributions = handler, head_updates

    def _report(self, heard: Heard) -> None:
        report, device = heard.message, heard.address.device
        if not isinstance(report, Report):
            return
        with self._lock:
            verdict = self._verdict(device, report, heard.address.path)
            run, round = heard.address.path
            self._note(device, verdict, report, run, int(round))
        self._answer(device, verdict)

    def _verdict(self, device: str, report: Report, path: tuple[str, ...]) -> Verdict | None:
        if barred := self.journal.barred(device):
            return Verdict(report.id, "rejected", barred)
        if self.journal.counted(device, report.id):
            return Verdict(report.id, "duplicate")
        if report.kind == "head":
            return self._on_head(device, report)
        round_request = self._open.get(report.id)
        if round_request is None or path != (round_request.run_id, str(round_request.round)):
            return Verdict(report.id, "rejected", STALE)
        if device not in round_request.cohort:
            return Verdict(report.id, "rejected", "not_in_cohort")
        return round_request.take_report(device, report)

    def _chunk(self, heard: Heard) -> None:
        device, (id, index) = heard.address.device, heard.address.path
        with self._lock:
            round_request, heads, payload = self._open.get(id), self._contributions, heard.message
            run, round = "", 0
            if not isinstance(payload, bytes) or self.journal.barred(device):
                verdict = None
            elif round_request and device in round_request.cohort:
                run, round = round_request.run_id, round_request.round
                verdict = round_request.take_chunk(device, int(index), payload)
            elif heads and heads.is_open(id):
                run, round = heads.place
                verdict = heads.take_chunk(device, id, int(index), payload)
            else:
                self.counts["stray chunk"] += 1
                verdict = None
            self._note(device, verdict, verdict.report if verdict else None, run, round)
        self._answer(device, verdict)

    def _note(
        self, device: str, verdict: Verdict | None, report: Report | None, run: str, round: int
    ) -> None:
        """Counts a verdict and writes it down; one for a device that is barred is counted only."""
        if verdict is None:
            return
        self.counts[verdict.reason or verdict.status] += 1
        if verdict.status == "rejected" and not self.journal.barred(device):
            self.journal.reject(device, run, round, verdict.id, verdict.reason, verdict.detail)
        elif verdict.status == "accepted" and report:
            self.journal.accept(device, run, round, report)

    def _malformed(self, device: str, kind: str, why: str) -> None:
        """What cannot even be read counts nowhere, and speaks against the device that sent it."""
        self.counts["malformed"] += 1
        if device and not self.journal.barred(device):
            self.journal.reject(device, "", 0, kind, "malformed", why)

    def _answer(self, device: str, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        if verdict.reason:
            log.warning(
                "report %s of %s: %s, %s",
                verdict.id,
                device,
                verdict.status,
                verdict.reason,
                extra={"device": device},
            )
        ack = Ack(verdict.id, verdict.status, verdict.reason)
        self._connection.say(self._connection.topics.ack(device), ack, expiry_s=ACK_EXPIRY_S)
