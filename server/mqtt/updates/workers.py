"""Several processes take the reports of one fleet: workers share them by MQTT 5 shared subscriptions, the coordinator runs the rounds.

The broker hands each report and each chunk to one of the workers (`$share`); they put them together in the registry (PostgreSQL, or
SQLite on one machine), judge them, and tell the device. The coordinator asks as ever and finds the judged answers in the registry. A worker
that dies takes nothing along: what it had not acknowledged its devices send again, to the others.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from typing import Literal, Self

import msgspec

from edge_fl.errors import EdgeFLError, ProtocolError
from edge_fl.learn.tree import from_arrays
from edge_fl.methods import build_method
from edge_fl.wire import tensors
from edge_fl.wire.blob import split
from edge_fl.wire.messages import Ack, Report, decode, encode
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import SAFETENSORS, Connected, Event, Packet, Transport
from server.mqtt.connection import Heard, ServerConnection
from server.mqtt.journal import Journal
from server.mqtt.retained import Connect
from server.mqtt.updates.inbox import ACK_EXPIRY_S, STALE, Inbox
from server.mqtt.updates.round_request import Answer, RoundRequest, Verdict
from server.mqtt.updates.validation import Terms, expected_of, flaw_of
from server.registry import devices, shared_reports
from server.registry.shared_reports import SharedRequest, ReportState, SharedReport

log = logging.getLogger(__name__)

GROUP = "agg"
LOOK_S = 0.1


def shared(pattern: str) -> str:
    """The pattern as one of a group of subscribers, each message to one of them."""
    return f"$share/{GROUP}/{pattern}"


class UpdateWorker:
    """Takes reports and chunks off the broker until closed. As a context manager."""

    def __init__(self, connect: Connect, journal: Journal) -> None:
        self._topics, self._journal, self._db = Topics(journal.fleet), journal, journal.db
        self.taken = 0
        self._begun = threading.Event()
        self._transport: Transport = connect(
            f"worker-{journal.fleet}-{secrets.token_hex(3)}", None, self._hear, session_expiry_s=0
        )
        self._begun.set()

    def __enter__(self) -> Self:
        self._transport.wait_connected(30.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def _hear(self, event: Event) -> None:
        """On the transport's thread: the broker waits with the next message while this one is written down."""
        if isinstance(event, Connected):
            self._begun.wait()  # a quick broker answers before the transport is ours
            self._transport.subscribe(shared(self._topics.report("+", "+", "+")))
            self._transport.subscribe(shared(self._topics.blob("+", "+", "+")))
        elif isinstance(event, Packet) and event.payload:
            try:
                address = self._topics.parse(event.topic)
                self._take(address, event)
            except ProtocolError as error:
                log.warning("%s: %s", event.topic, error)
            except EdgeFLError as error:  # not acknowledged: it comes again
                log.warning("worker: %s", error)

    def _take(self, address: Address, packet: Packet) -> None:
        device = address.device
        if address.kind == "rpt":
            report, (run, round) = decode(packet.payload, Report), address.path
            self._take_report(device, run, int(round), report)
        elif address.kind == "blob" and packet.content_type == SAFETENSORS:
            id, index = address.path
            if not self._journal.barred(device) and (id.startswith(shared_reports.RELEASE_PREFIX) or self._asked(id)):
                shared_reports.add_chunk(self._db, self._journal.fleet, device, id, int(index), packet.payload)
                self._settle(device, id)

    def _take_report(self, device: str, run: str, round: int, report: Report) -> None:
        self.taken += 1
        request = self._asked(report.id)
        if barred := self._journal.barred(device):
            self._answer(device, Verdict(report.id, "rejected", barred))
        elif self._journal.counted(device, report.id):
            self._answer(device, Verdict(report.id, "duplicate"))
        elif report.kind != "head" and (request is None or (run, round) != (request.run, request.round)):
            self._refuse(device, run, round, report.id, STALE)
        elif request and device not in request.cohort:
            self._refuse(device, run, round, report.id, "not_in_cohort")
        else:
            shared_reports.add_report(self._db, self._journal.fleet, device, run, round, report)
            self._settle(device, report.id)

    def _settle(self, device: str, id: str) -> None:
        """Judges the answer if it is whole; its device is told once that is written down."""
        request = self._asked(id)

        def judge(report: Report, chunks: Mapping[int, bytes]) -> tuple[ReportState, str] | None:
            if report.kind == "head":
                whole = report.blob is None or report.error or len(chunks) >= len(report.blob.chunks)
                return ("passed", "") if whole else None
            if request is None:
                return "rejected", STALE
            verdict = self._verdict(request, device, report, chunks)
            return None if verdict is None else ("rejected" if verdict.reason else "accepted", verdict.reason)

        found = shared_reports.validate_report(self._db, self._journal.fleet, device, id, judge)
        if found is None or found.state == "passed":
            return
        judged, reason = found, found.reason
        if reason:
            self._refuse(device, judged.run, judged.round, id, reason)
        else:
            self._journal.accept(device, judged.run, judged.round, judged.report)
            self._answer(device, Verdict(id, "accepted"))

    def _verdict(
        self, request: SharedRequest, device: str, report: Report, chunks: Mapping[int, bytes]
    ) -> Verdict | None:
        """As the one server would have judged it: by an exchange of its own."""
        terms = msgspec.convert(request.terms, Terms)
        method = build_method(terms.spec).at(max(request.round, 1))
        round_request = RoundRequest(
            request.id,
            request.run,
            request.round,
            request.mode,
            [device],
            expected_of(method, whole=request.mode == "train"),
            self._samples,
            flaw_of(method, terms),
        )
        verdict = round_request.take_report(device, report)
        for index, payload in chunks.items():
            verdict = verdict or round_request.take_chunk(device, index, payload)
        return verdict

    def _samples(self, device: str) -> int:
        known = devices.get(self._db, self._journal.fleet, device)
        return int((known.capability or {}).get("samples", 0)) if known else 0

    def _asked(self, id: str) -> SharedRequest | None:
        return shared_reports.get_request(self._db, self._journal.fleet, id)

    def _refuse(self, device: str, run: str, round: int, id: str, reason: str) -> None:
        self._journal.reject(device, run, round, id, reason)
        self._answer(device, Verdict(id, "rejected", reason))

    def _answer(self, device: str, verdict: Verdict) -> None:
        ack = Ack(verdict.id, verdict.status, verdict.reason)
        self._transport.publish(Packet(self._topics.ack(device), encode(ack), expiry_s=ACK_EXPIRY_S))


class SharedInbox(Inbox):
    """The coordinator's inbox: reports come to it through the registry, judged; those of heads it judges itself, as ever."""

    def __init__(self, connection: ServerConnection, journal: Journal) -> None:
        super().__init__(connection, journal)
        self._round_requests: dict[str, RoundRequest] = {}
        shared_reports.clear(journal.db, journal.fleet)
        self._closing = threading.Event()
        threading.Thread(target=self._look, name="edge-fl-shared-reports", daemon=True).start()

    def open(self, round_request: RoundRequest, terms: Terms) -> None:
        place = (round_request.id, round_request.run_id, round_request.round, round_request.mode)
        asked = SharedRequest(
            self.journal.fleet, *place, sorted(round_request.cohort), msgspec.to_builtins(terms)
        )
        self._round_requests[round_request.id] = round_request
        shared_reports.open_request(self.journal.db, asked)

    def close(self, round_request: RoundRequest) -> None:
        super().close(round_request)
        shared_reports.close_request(self.journal.db, self.journal.fleet, round_request.id)
        self._round_requests.pop(round_request.id, None)

    def stop(self) -> None:
        """Looks no more."""
        self._closing.set()

    def _look(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                for found in shared_reports.validated(self.journal.db, self.journal.fleet):
                    self._deliver(found)
                    shared_reports.remove(self.journal.db, found.number)
            except EdgeFLError as error:
                log.warning("%s", error)

    def _deliver(self, found: SharedReport) -> None:
        round_request, report = self._round_requests.get(found.id), found.report
        if found.state == "passed":
            self._report(Heard(Address("rpt", found.device, (found.run, str(found.round))), report))
            if found.payload and report.blob:
                for index, chunk in enumerate(split(found.payload, report.blob.chunk_bytes)):
                    self._chunk(Heard(Address("blob", found.device, (report.id, str(index))), bytes(chunk)))
        elif round_request and found.device not in round_request.settled:
            word: Literal["accepted", "rejected"] = "rejected" if found.reason else "accepted"
            round_request.settled[found.device] = Verdict(found.id, word, found.reason)  # it counts once
            self.counts[found.reason or found.state] += 1
            parts = from_arrays(tensors.unpack(found.payload)) if found.payload else {}
            round_request.answers.put(Answer(found.device, report, parts, found.reason))
