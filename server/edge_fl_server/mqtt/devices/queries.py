"""Ask one device for its log or a diagnostics bundle, over a connection of the operator; no server need be online.

A broker that names clients by their certificates ends the older of two connections with one identity: whose connection was ended asks again
when the other one may have its answer, so that two at once do not keep interrupting each other.

The answer comes as a descriptor and chunks. On a fleet with certificates it counts only with the signature of the device's own key, over
fleet, device, query and content. A bundle is written as evidence:

FOLDER/diagnostics.json    what the device sent
FOLDER/signature.json      fleet, device, query and sha256 as signed, the certificate (PEM) and the signature (base64)
FOLDER/errors.txt          its recent warnings and errors, one per line
"""

import base64
import queue
import secrets
import time
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec.structs import replace

from edge_fl.blob import Assembly
from edge_fl.errors import (
    ConnectError,
    DeadlineError,
    EdgeFLError,
    InputError,
    ProtocolError,
    RunError,
    TrustError,
    nearest,
)
from edge_fl.failures import Failure
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.secure.signatures import Authorities, require_signed
from edge_fl.wire.identity import IdentityError
from edge_fl.wire.messages import (
    GONE,
    MAX_ANSWER_BYTES,
    QUERY_ANSWERS,
    DeviceState,
    Diagnostics,
    Logs,
    Query,
    QueryReply,
    answer_content,
    decode,
    encode,
)
from edge_fl.wire.topics import Topics, checked, checked_device
from edge_fl.wire.transport import Disconnected, Event, Packet, Transport
from edge_fl_server.mqtt.connector import ServerConnect, passing_client
from edge_fl_server.mqtt.device_packets import decode_cleaned, one_line

CONNECT_S = 5.0
SETTLE_S = 1.0
PAUSE_S = (2.0, 8.0)  # after an interruption: about as long as a query takes
PAUSES = secrets.SystemRandom()
SHARED = "another program may be using the same identity, which a broker allows one connection: give each person an identity"


@dataclass(frozen=True)
class QueryAnswer:
    """A device's answer: its content, decoded and as the bytes that were signed, and the reply. `signed`: the signature was verified."""

    device: str
    content: Logs | Diagnostics
    payload: bytes
    reply: QueryReply
    signed: bool


def ask(
    connect: ServerConnect,
    fleet: str,
    device: str,
    query: Query,
    authorities: Authorities = (),
    *,
    deadline_s: float,
    notify: Callable[[str], None] = lambda line: None,
    known: Iterable[str] = (),
) -> QueryAnswer:
    """Send a query and wait for the complete answer; with `authorities` its signature must be that of the device's certificate.

    `notify` receives a line when the connection was ended and the query is sent again, within the same deadline; `known` are the fleet's
    devices, of which the one nearest to a mistyped name is named.

    Raises InputError for an unknown device, ConnectError without a broker or for a device that is not connected, RunError if the device
    declines, DeadlineError without an answer, TrustError for a wrong signature.
    """
    topics, until = Topics(checked(fleet, "fleet")), time.monotonic() + deadline_s
    while True:
        try:
            left_s = max(until - time.monotonic(), 1.0)
            with passing_client(connect, "operator") as (transport, events):
                once = replace(query, id=secrets.token_hex(8))
                conversation = _Conversation(topics, checked_device(device), once, events, known)
                return conversation.hold(transport, authorities, left_s)
        except _InterruptedError as error:
            pause_s = PAUSES.uniform(*PAUSE_S)
            if time.monotonic() + pause_s > until:
                raise ConnectError(
                    f"{device}: the connection was ended ({error}); {SHARED}", "nothing was read"
                ) from error
            notify(f"{device}: the connection was ended ({error}); {SHARED}; asking again in {pause_s:.0f} s")
            time.sleep(pause_s)


class _InterruptedError(Exception):
    """The connection was lost before the answer was complete."""


class _Conversation:
    """One query and what arrives in answer to it."""

    def __init__(
        self,
        topics: Topics,
        device: str,
        query: Query,
        events: queue.SimpleQueue[Event],
        known: Iterable[str],
    ) -> None:
        self._topics, self._device, self._query, self._events = topics, device, query, events
        self._known = known
        self._state: DeviceState | None = None
        self._reply: QueryReply | None = None
        self._chunks: dict[int, bytes] = {}

    def hold(self, transport: Transport, authorities: Authorities, deadline_s: float) -> QueryAnswer:
        """Ask. Raises as `ask`, and _InterruptedError if the connection is lost."""
        transport.wait_connected(CONNECT_S)
        topics, device = self._topics, self._device
        chunks = topics.up(device, "query", self._query.id, "+")
        for topic in (topics.up(device, "query"), chunks, topics.up(device, "state")):
            transport.subscribe(topic)
        self._listen(SETTLE_S, lambda: self._state is not None)
        self._require_present()
        topic, expiry_s = topics.down(device, "query"), max(1, round(deadline_s))
        transport.publish(Packet(topic, encode(self._query), expiry_s=expiry_s))
        transport.drain(CONNECT_S)
        if reason := getattr(transport, "denied", {}).get(topic):
            raise ConnectError(
                f"{topic}: denied by the broker ({reason}); expected the identity of the operator",
                consequence="the device was not asked",
            )
        self._listen(deadline_s, self._complete)
        return self._answer(authorities, deadline_s)

    def _listen(self, limit_s: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + limit_s
        while not done() and (left := until - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                return
            if isinstance(event, Disconnected):
                raise _InterruptedError(event.reason)
            if isinstance(event, Packet) and event.payload:
                self._receive(event)

    def _receive(self, packet: Packet) -> None:
        try:
            address = self._topics.parse(packet.topic)
            match address.kind:
                case "state":
                    self._state = decode_cleaned(packet.payload, DeviceState)
                case "query_reply":
                    reply = decode(packet.payload, QueryReply)
                    if reply.id == self._query.id and self._reply is None:
                        self._reply = reply
                case "query_chunk" if len(self._chunks) <= MAX_ANSWER_BYTES // 1024:
                    self._chunks[int(address.path[1])] = packet.payload
        except ProtocolError as error:
            raise RunError(f"{self._device}: {error.message}", "the answer was not used") from error

    def _require_present(self) -> None:
        state, name = self._state, self._device
        if state is None:
            raise InputError(
                f"fleet {self._topics.fleet!r}: no device {name!r} on this broker{nearest(name, self._known)},"
                " expected one of 'edge-fl fleet list'",
                "nothing was read",
            )
        if state.status in GONE:
            raise ConnectError(
                f"{name}: not connected ({state.status}), so it cannot answer",
                "nothing was read; 'edge-fl fleet list' shows when it was last seen",
            )

    def _complete(self) -> bool:
        if (reply := self._reply) is None:
            return False
        return reply.blob is None or len(self._chunks) >= len(reply.blob.chunks)

    def _answer(self, authorities: Authorities, deadline_s: float) -> QueryAnswer:
        name, reply = self._device, self._reply
        if reply is None or (reply.blob and len(self._chunks) < len(reply.blob.chunks)):
            raise DeadlineError(
                f"{name}: {'no' if reply is None else 'an incomplete'} answer in {deadline_s:g} s, although it is connected according to"
                " the broker; revoked, or on a slow or broken link",
                "nothing was read",
            )
        if reply.blob is None:
            word = Failure.of(reply.reason)
            known = word.explanation if word else "it gave no reason that this version knows"
            raise RunError(f"{name}: no answer: {known}", "nothing was read")
        if reply.blob.bytes > MAX_ANSWER_BYTES:
            raise ProtocolError(f"{name}: an answer of {reply.blob.bytes} bytes, at most {MAX_ANSWER_BYTES}")
        content = answer_content(self._topics.fleet, name, self._query.id, reply.blob.sha256)
        try:
            if authorities:
                require_signed(reply.certificate, name, content, reply.signature, authorities)
            assembly = Assembly(reply.blob)
            for index, chunk in self._chunks.items():
                assembly.add(index, chunk)
            payload = assembly.join()
            answer = decode(payload, QUERY_ANSWERS[self._query.what])
        except IdentityError as error:
            raise TrustError(f"the answer of {error.message}", consequence="it was not used") from error
        except EdgeFLError as error:
            raise RunError(f"{name}: {error.message}", "the answer was not used") from error
        return QueryAnswer(name, answer, payload, reply, bool(authorities))


def require_new(out: Path | None) -> None:
    """Raise InputError if `out` exists: a bundle is evidence and not overwritten."""
    if out and out.exists():
        raise InputError(f"--out {text(out)}: exists already, expected a new folder or .zip file")


def write_bundle(answer: QueryAnswer, fleet: str, out: Path | None = None) -> Path:
    """Write a bundle to a new folder or .zip file and return it. Raises InputError if that is not possible."""
    time = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    out = out or Path(f"diagnostics-{answer.device}-{time}")
    files = _files(answer, fleet)
    try:
        if out.suffix == ".zip":
            out.parent.mkdir(parents=True, exist_ok=True)
            with (
                atomic.writing(out, private=True) as file,
                zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
            ):
                for name, content in files.items():
                    archive.writestr(name, content)
        else:
            out.mkdir(mode=0o700, parents=True)
            for name, content in files.items():
                atomic.write(out / name, content, private=True)
    except OSError as error:
        raise InputError(f"--out {text(out)}: {error.strerror}; expected a writable folder") from error
    return out


def _files(answer: QueryAnswer, fleet: str) -> dict[str, bytes]:
    assert isinstance(answer.content, Diagnostics) and answer.reply.blob
    content = answer_content(fleet, answer.device, answer.reply.id, answer.reply.blob.sha256)
    certificate = ""
    if answer.signed:
        pem = x509.load_der_x509_certificate(answer.reply.certificate).public_bytes(Encoding.PEM)
        certificate = pem.decode()
    signature = base64.b64encode(answer.reply.signature).decode() if answer.signed else ""
    signed = msgspec.json.encode({**content, "certificate": certificate, "signature": signature})
    lines = (f"{line.at} {line.level} {one_line(line.text)}\n" for line in answer.content.errors)
    return {
        "diagnostics.json": answer.payload,
        "signature.json": msgspec.json.format(signed, indent=2),
        "errors.txt": "".join(lines).encode(),
    }
