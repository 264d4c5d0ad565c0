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
from server.mqtt.connection import Heard, Link
from server.mqtt.journal import Journal
from server.mqtt.updates.head_updates import Contributions
from server.mqtt.updates.round_request import Exchange, Verdict
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

    def __init__(self, link: Link, journal: Journal | None = None) -> None:
        self._link = link
        self.journal = journal or Journal(fleet=link.topics.fleet)
        self._open: dict[str, Exchange] = {}
        self._lock = threading.Lock()
        self._on_head: HeadHandler = lambda device, report: Verdict(report.id, "rejected", STALE)
        self._contributions: Contributions | None = None
        self.counts: Counter[str] = Counter()
        link.on("rpt", self._report)
        link.on("blob", self._chunk)
        link.on_refused(self._malformed)

    def open(self, exchange: Exchange, terms: Terms) -> None:
        """From now on answers to this exchange are taken; `terms` are what it judges by."""
        with self._lock:
            self._open[exchange.id] = exchange

    def close(self, exchange: Exchange) -> None:
        """From now on they are late."""
        with self._lock:
            self._open.pop(exchange.id, None)

    def on_head(self, handler: HeadHandler, contributions: Contributions) -> None:
        """Who takes the reports of fitted heads, and the chunks that come with them."""
        self._on_head, self._contributions = handler, contributions

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
        exchange = self._open.get(report.id)
        if exchange is None or path != (exchange.task, str(exchange.round)):
            return Verdict(report.id, "rejected", STALE)
        if device not in exchange.cohort:
            return Verdict(report.id, "rejected", "not_in_cohort")
        return exchange.take_report(device, report)

    def _chunk(self, heard: Heard) -> None:
        device, (id, index) = heard.address.device, heard.address.path
        with self._lock:
            exchange, heads, payload = self._open.get(id), self._contributions, heard.message
            run, round = "", 0
            if not isinstance(payload, bytes) or self.journal.barred(device):
                verdict = None
            elif exchange and device in exchange.cohort:
                run, round = exchange.task, exchange.round
                verdict = exchange.take_chunk(device, int(index), payload)
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
        self._link.say(self._link.topics.ack(device), ack, expiry_s=ACK_EXPIRY_S)
