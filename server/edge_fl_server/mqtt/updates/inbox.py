"""The inbox: every report gets exactly one acknowledgement: accepted, duplicate, or rejected with a reason.

Reports on an open round request go to it; reports of fitted heads go to the roll-out of their release; all others are stale. The topic
determines the sender, the run and the round of a report.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from edge_fl.failures import Failure
from edge_fl.wire.messages import Ack, Report
from edge_fl_server.mqtt.connection import ReceivedMessage, ServerConnection
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.updates.head_updates import HeadUpdates
from edge_fl_server.mqtt.updates.round_request import RoundRequest, UpdateVerdict
from edge_fl_server.mqtt.updates.validation import UpdateTerms

log = logging.getLogger(__name__)

ACK_EXPIRY_S = 3600

HeadHandler = Callable[[str, Report], UpdateVerdict | None]
"""(device, report) -> verdict; None while chunks are missing."""


class Inbox:
    """Route reports and chunks; `counts` counts the verdicts by status or reason.

    An accepted report is in the journal before it is acknowledged.
    """

    def __init__(self, connection: ServerConnection, journal: Journal) -> None:
        self._connection, self.journal = connection, journal
        self._open: dict[str, RoundRequest] = {}
        self._lock = threading.Lock()
        self._on_head: HeadHandler = lambda device, report: None  # the device sends it again
        self._head_updates: HeadUpdates | None = None
        self.counts: Counter[str] = Counter()
        connection.on("rpt", self._on_report)
        connection.on("blob", self._on_chunk)
        connection.on_malformed = self._on_malformed
        connection.on_rejected = self._on_rejected
        connection.on_excess = lambda *excess: self.journal.record_excess(*excess)
        connection.is_blocked = journal.blocked

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

    def _on_malformed(self, device: str, kind: str, error: str) -> None:
        self.counts[Failure.MALFORMED] += 1
        if device and not self.journal.blocked(device):
            self.journal.reject(device, "", 0, kind, Failure.MALFORMED, error)

    def _on_rejected(self, why: str) -> None:
        self.counts[why] += 1

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
