"""Ask one device for its log or a diagnostics bundle, over a connection of the operator; no server need be online.

A broker that names clients by their certificates ends the older of two connections with one identity: whose connection was ended asks again
when the other one may have its answer, so that two at once do not keep interrupting each other.

The answer comes as a descriptor and chunks. On a fleet with certificates it counts only with the signature of the device's own key, over
fleet, device, query and content.
"""

import queue
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

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
)
from edge_fl.failures import Failure
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
from edge_fl_server.mqtt.device_text import decode_cleaned
from edge_fl_server.mqtt.reader import ServerConnect

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
) -> QueryAnswer:
    """Send a query and wait for the complete answer; with `authorities` its signature must be that of the device's certificate.

    `notify` receives a line when the connection was ended and the query is sent again, within the same deadline.

    Raises InputError for an unknown device, ConnectError without a broker or for a device that is not connected, RunError if the device
    declines, DeadlineError without an answer, TrustError for a wrong signature.
    """
    topics, until = Topics(checked(fleet, "fleet")), time.monotonic() + deadline_s
    while True:
        try:
            left_s = max(until - time.monotonic(), 1.0)
            return _ask_once(connect, topics, checked_device(device), query, authorities, left_s)
        except _InterruptedError as error:
            pause_s = PAUSES.uniform(*PAUSE_S)
            if time.monotonic() + pause_s > until:
                raise ConnectError(
                    f"{device}: the connection was ended ({error}); {SHARED}", "nothing was read"
                ) from error
            notify(f"{device}: the connection was ended ({error}); {SHARED}; asking again in {pause_s:.0f} s")
            time.sleep(pause_s)


def _ask_once(
    connect: ServerConnect,
    topics: Topics,
    device: str,
    query: Query,
    authorities: Authorities,
    deadline_s: float,
) -> QueryAnswer:
    """Ask over a new connection. Raises as `ask`, and _InterruptedError if the connection is lost."""
    conversation = _Conversation(topics, device, replace(query, id=secrets.token_hex(8)))
    transport = connect(
        f"operator-{secrets.token_hex(4)}",
        None,
        conversation.events.put,
        session_expiry_s=0,
        clean_start=True,
    )
    try:
        return conversation.hold(transport, authorities, deadline_s)
    finally:
        transport.close()


class _InterruptedError(Exception):
    """The connection was lost before the answer was complete."""


class _Conversation:
    """One query and what arrives in answer to it."""

    def __init__(self, topics: Topics, device: str, query: Query) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._topics, self._device, self._query = topics, device, query
        self._state: DeviceState | None = None
        self._reply: QueryReply | None = None
        self._chunks: dict[int, bytes] = {}

    def hold(self, transport: Transport, authorities: Authorities, deadline_s: float) -> QueryAnswer:
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
                event = self.events.get(timeout=left)
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
                f"fleet {self._topics.fleet!r}: no device {name!r} on this broker, expected one of 'edge-fl fleet list'",
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
