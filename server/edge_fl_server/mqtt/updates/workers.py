"""Several processes that receive the reports of one fleet: workers share an MQTT 5 subscription, the coordinator runs the rounds.

The broker delivers each report and each chunk to one of the workers (`$share`). Workers put them together in the registry (PostgreSQL, or
SQLite on one machine), validate and acknowledge them. The coordinator sends round requests and reads the validated reports from the
registry. If a worker crashes, devices send again what it had not acknowledged, to the other workers.
"""

import logging
import secrets
import threading
from collections.abc import Mapping
from typing import Literal, Self

import msgspec
from msgspec import Struct

from edge_fl import threads
from edge_fl.blob import split
from edge_fl.errors import EdgeFLError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.learn.tree import from_arrays
from edge_fl.methods import build_method
from edge_fl.secure.signatures import Authorities
from edge_fl.untrusted import converted
from edge_fl.wire import tensors
from edge_fl.wire.messages import Ack, Mode, Report, encode
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import SAFETENSORS, Connected, Event, Packet, Transport
from edge_fl_server.mqtt.connection import ReceivedMessage, ServerConnection
from edge_fl_server.mqtt.connector import ServerConnect
from edge_fl_server.mqtt.device_packets import MalformedPackets, RateLimit, decode_cleaned
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.statements import Statements
from edge_fl_server.mqtt.updates.inbox import ACK_EXPIRY_S, Inbox, Response, RoundRequest, UpdateVerdict
from edge_fl_server.mqtt.updates.validation import UpdateTerms, Validator
from edge_fl_server.registry import registered_devices, shared_reports
from edge_fl_server.registry.shared_reports import ReportState, SharedReport

log = logging.getLogger(__name__)

GROUP = "agg"
POLL_S = 0.1
CONNECT_S = 30.0


def shared(pattern: str) -> str:
    """The shared subscription to a pattern: the broker delivers each message to one worker."""
    return f"$share/{GROUP}/{pattern}"


class SharedRequest(Struct, frozen=True):
    """A round request, as far as a worker needs it to validate reports."""

    run: str
    round: int
    mode: Mode
    cohort: list[str]
    terms: UpdateTerms


class UpdateWorker:
    """Receive reports and chunks until closed. A context manager."""

    def __init__(self, connect: ServerConnect, journal: Journal, authorities: Authorities = ()) -> None:
        self._topics, self._journal, self._db = Topics(journal.fleet), journal, journal.db
        self._statements = Statements(journal, authorities)
        self.received = 0
        self._rate_limit = RateLimit(self._topics, journal.record_excess, journal.blocked)
        self._malformed = MalformedPackets()
        self._ready, self._subscribed = threading.Event(), threading.Event()
        self._transport: Transport = connect(
            f"worker-{journal.fleet}-{secrets.token_hex(3)}", None, self._on_event, session_expiry_s=0
        )
        self._ready.set()

    def __enter__(self) -> Self:
        self._transport.wait_connected(CONNECT_S)
        self._subscribed.wait(CONNECT_S)
        self._transport.drain(CONNECT_S)  # from now on the broker delivers reports
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def _on_event(self, event: Event) -> None:
        """Handle an event on the transport's thread: the broker sends the next message after this one is stored."""
        if isinstance(event, Connected):
            self._ready.wait()  # the broker may answer before `_transport` is assigned
            self._transport.subscribe(shared(self._topics.up("+", "rpt", "+", "+")))
            self._transport.subscribe(shared(self._topics.up("+", "blob", "+", "+")))
            self._subscribed.set()
        elif isinstance(event, Packet) and event.payload and self._rate_limit.admits(event):
            try:
                self._on_packet(self._topics.parse(event.topic), event)
            except ProtocolError as error:
                self._malformed.add(self._topics.sender(event.topic), event.topic, error, self._journal.lines)
            except EdgeFLError as error:  # not acknowledged, so the device sends it again
                sender = self._topics.sender(event.topic)
                self._journal.lines.write(log, logging.WARNING, sender, "worker: %s", error)

    def _on_packet(self, address: Address, packet: Packet) -> None:
        device = address.device
        if address.kind == "rpt":
            report, (run, round) = decode_cleaned(packet.payload, Report), address.path
            self._statements.require(address, packet.payload, report)
            self._on_report(device, run, int(round), report)
        elif address.kind == "blob" and packet.content_type == SAFETENSORS:
            id, index = address.path
            expected = id.startswith(shared_reports.RELEASE_PREFIX) or self._request(id)
            if expected and not self._journal.blocked(device):
                shared_reports.add_chunk(
                    self._db, self._journal.fleet, device, id, int(index), packet.payload
                )
                self._validate(device, id)

    def _on_report(self, device: str, run: str, round: int, report: Report) -> None:
        self.received += 1
        request = self._request(report.id)
        if reason := self._journal.blocked(device):
            self._acknowledge(device, UpdateVerdict(report.id, "rejected", reason))
        elif self._journal.is_accepted(device, report.id):
            self._acknowledge(device, UpdateVerdict(report.id, "duplicate"))
        elif report.kind != "head" and (request is None or (run, round) != (request.run, request.round)):
            self._reject(device, run, round, report.id, Failure.STALE_ROUND)
        elif request and device not in request.cohort:
            self._reject(device, run, round, report.id, Failure.NOT_IN_COHORT)
        else:
            shared_reports.add_report(self._db, self._journal.fleet, device, run, round, report)
            self._validate(device, report.id)

    def _validate(self, device: str, id: str) -> None:
        """Validate a report if it is complete, store the result, then acknowledge it."""
        request = self._request(id)

        def validate(report: Report, chunks: Mapping[int, bytes]) -> tuple[ReportState, str] | None:
            if report.kind == "head":
                complete = report.blob is None or report.error or len(chunks) >= len(report.blob.chunks)
                return ("passed", "") if complete else None
            if request is None:
                return "rejected", Failure.STALE_ROUND
            verdict = self._verdict(request, device, report, chunks)
            return None if verdict is None else ("rejected" if verdict.reason else "accepted", verdict.reason)

        shared = shared_reports.validate_report(self._db, self._journal.fleet, device, id, validate)
        if shared is None or shared.state == "passed":
            return
        if shared.reason:
            self._reject(device, shared.run, shared.round, id, shared.reason)
        else:
            self._journal.accept(device, shared.run, shared.round, shared.report)
            self._acknowledge(device, UpdateVerdict(id, "accepted"))

    def _verdict(
        self, request: SharedRequest, device: str, report: Report, chunks: Mapping[int, bytes]
    ) -> UpdateVerdict | None:
        """The verdict of a single server on the same report and chunks."""
        method = build_method(request.terms.spec).at(max(request.round, 1))
        validator = Validator.of(method, request.mode, request.terms, self._samples)
        round_request = RoundRequest(report.id, request.run, request.round, request.mode, [device], validator)
        verdict = round_request.take_report(device, report)
        for index, payload in chunks.items():
            verdict = verdict or round_request.take_chunk(device, index, payload)
        return verdict

    def _samples(self, device: str) -> int:
        record = registered_devices.get(self._db, self._journal.fleet, device)
        return int((record.capability or {}).get("samples", 0)) if record else 0

    def _request(self, id: str) -> SharedRequest | None:
        content = shared_reports.get_request(self._db, self._journal.fleet, id)
        return converted(content, SharedRequest) if content else None

    def _reject(self, device: str, run: str, round: int, id: str, reason: str) -> None:
        self._journal.reject(device, run, round, id, reason)
        self._acknowledge(device, UpdateVerdict(id, "rejected", reason))

    def _acknowledge(self, device: str, verdict: UpdateVerdict) -> None:
        ack = Ack(verdict.id, verdict.status, verdict.reason)
        self._transport.publish(Packet(self._topics.down(device, "ack"), encode(ack), expiry_s=ACK_EXPIRY_S))


class SharedInbox(Inbox):
    """The coordinator's inbox: validated reports come from the registry; reports of heads are validated here."""

    def __init__(self, connection: ServerConnection) -> None:
        super().__init__(connection)
        self._round_requests: dict[str, RoundRequest] = {}
        shared_reports.clear(self.journal.db, self.journal.fleet)
        self._closing = threading.Event()
        threads.lasting(self._poll, "edge-fl-shared-reports", stopped=self._closing).start()

    def open(self, round_request: RoundRequest, terms: UpdateTerms) -> None:
        self._round_requests[round_request.id] = round_request
        cohort = sorted(round_request.cohort)
        request = SharedRequest(round_request.run_id, round_request.round, round_request.mode, cohort, terms)
        content = msgspec.to_builtins(request)
        shared_reports.open_request(self.journal.db, self.journal.fleet, round_request.id, content)

    def close(self, round_request: RoundRequest) -> None:
        super().close(round_request)
        shared_reports.close_request(self.journal.db, self.journal.fleet, round_request.id)
        self._round_requests.pop(round_request.id, None)

    def stop(self) -> None:
        """Stop reading the registry."""
        self._closing.set()

    def _poll(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                for shared in shared_reports.validated(self.journal.db, self.journal.fleet):
                    self._try(shared)
                    shared_reports.remove(self.journal.db, shared.number)
            except EdgeFLError as error:
                log.warning("%s", error)

    def _try(self, shared: SharedReport) -> None:
        """Deliver a report; one that fails unexpectedly must not keep back those after it. Raises EdgeFLError: it is delivered later."""
        try:
            self._deliver(shared)
        except EdgeFLError:
            raise
        except Exception:
            log.exception("%s: report %s could not be delivered; dropped", shared.device, shared.id)

    def _deliver(self, shared: SharedReport) -> None:
        round_request, report = self._round_requests.get(shared.id), shared.report
        if shared.state == "passed":
            self._on_report(
                ReceivedMessage(Address("rpt", shared.device, (shared.run, str(shared.round))), report)
            )
            if shared.payload and report.blob:
                for index, chunk in enumerate(split(shared.payload, report.blob.chunk_bytes)):
                    address = Address("blob", shared.device, (report.id, str(index)))
                    self._on_chunk(ReceivedMessage(address, bytes(chunk)))
        elif round_request and shared.device not in round_request.verdicts:  # it counts once
            if not shared.reason:  # its worker may not have stored this yet, and the round may end at once
                self.journal.accept(shared.device, shared.run, shared.round, report)
            status: Literal["accepted", "rejected"] = "rejected" if shared.reason else "accepted"
            verdict = UpdateVerdict(shared.id, status, shared.reason)
            round_request.verdicts[shared.device] = verdict
            self._log(shared.device, verdict)
            self.counts[shared.reason or shared.state] += 1
            parts = from_arrays(tensors.unpack(shared.payload)) if shared.payload else {}
            round_request.responses.put(Response(shared.device, report, parts, shared.reason))
