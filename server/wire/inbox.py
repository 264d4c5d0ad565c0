"""Every report gets exactly one answer: accepted, duplicate, or rejected with a reason. Nothing counts twice, nothing counts late.

Reports on an exchange that is open go there; reports of fitted heads go to whoever released their extractor; all others are stale. Whose
report it is, and for which round, is told by its topic.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from edge_fl.wire.messages import Ack, Report
from server.wire.contributions import Contributions
from server.wire.exchange import Exchange, Verdict
from server.wire.link import Heard, Link

log = logging.getLogger(__name__)

REMEMBERED = 100_000
ACK_EXPIRY_S = 3600
STALE = "stale_round"

HeadHandler = Callable[
    [str, Report], Verdict | None
]  # (device, report) -> the answer, None while chunks are missing


class Inbox:
    """Routes reports and chunks; `counts` says how many were accepted, duplicate, or rejected for which reason."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._open: dict[str, Exchange] = {}
        self._accepted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()
        self._on_head: HeadHandler = lambda device, report: Verdict(report.id, "rejected", STALE)
        self._contributions: Contributions | None = None
        self.counts: Counter[str] = Counter()
        link.on("rpt", self._report)
        link.on("blob", self._chunk)

    def open(self, exchange: Exchange) -> None:
        """From now on answers to this exchange are taken."""
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
            self._note(device, verdict)
        self._answer(device, verdict)

    def _verdict(self, device: str, report: Report, path: tuple[str, ...]) -> Verdict | None:
        if (device, report.id) in self._accepted:
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
            if not isinstance(payload, bytes):
                verdict = None
            elif exchange and device in exchange.cohort:
                verdict = exchange.take_chunk(device, int(index), payload)
            elif heads and heads.is_open(id):
                verdict = heads.take_chunk(device, id, int(index), payload)
            else:
                self.counts["stray chunk"] += 1
                verdict = None
            self._note(device, verdict)
        self._answer(device, verdict)

    def _note(self, device: str, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        self.counts[verdict.reason or verdict.status] += 1
        if verdict.status == "accepted":
            self._accepted[device, verdict.id] = None
            if len(self._accepted) > REMEMBERED:
                self._accepted.popitem(last=False)

    def _answer(self, device: str, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        if verdict.reason:
            log.warning("report %s of %s: %s, %s", verdict.id, device, verdict.status, verdict.reason)
        ack = Ack(verdict.id, verdict.status, verdict.reason)
        self._link.say(self._link.topics.ack(device), ack, expiry_s=ACK_EXPIRY_S)
