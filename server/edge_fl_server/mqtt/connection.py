"""The server's connection: one server per fleet, one receive thread, every message decoded or counted as malformed.

Before it connects, a server reads the retained srv/state: another server that is online holds the lease. Its own state is also its will,
so that devices learn of a crash from the broker. It publishes its state at every connection, and everything else too if the broker has lost
its session. Packets become (address, message) pairs on the receive thread and go to the handlers of their kind; packets that break the
protocol or exceed a device's rate limit are counted by sender and dropped. Tasks that wait for the broker run on a background thread.
"""

import logging
import queue
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from msgspec import Struct

from edge_fl import threads
from edge_fl.errors import ConnectError, DeadlineError, EdgeFLError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.fleet.remote_settings import DesiredSettings
from edge_fl.release.agent import AgentUpdate
from edge_fl.secure.signatures import Authorities, ForgedError
from edge_fl.wire.messages import MESSAGES, Assignment, Beat, Command, ServerState, SumStep, encode
from edge_fl.wire.topics import REPORTS, UP, Address, Topics, role_of
from edge_fl.wire.transport import SAFETENSORS, Connected, Disconnected, Event, Packet, Transport
from edge_fl_server.mqtt.connector import (
    LIMITS,
    MAX_EPOCH,
    LeaseLimits,
    ServerConnect,
    is_alive,
    server_state,
)
from edge_fl_server.mqtt.device_packets import (
    MalformedPackets,
    RateLimit,
    decode_cleaned,
    kind_of,
    one_line,
)
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.statements import Statements

log = logging.getLogger(__name__)
M = TypeVar("M", Assignment, Command, AgentUpdate, DesiredSettings, SumStep)


@dataclass(frozen=True)
class ReceivedMessage:
    """A received message: its topic's address and its content; None if a retained message was cleared."""

    address: Address
    message: Struct | bytes | None
    retained: bool = False


Handler = Callable[[ReceivedMessage], None]


class SignsForDevices(Protocol):
    """What signs messages for devices: `edge_fl_server.release.rollout.director.Director`."""

    def sign(self, kind: str, device: str, message: M, *, lasts: bool = ...) -> M: ...

    def is_stale(self, message: Assignment | Command | AgentUpdate | DesiredSettings) -> bool: ...


class ServerConnection:
    """Register handlers with `on` and `on_connected`, then `open`. Handlers run on the receive thread and must not wait.

    Packets that break the protocol, that their devices did not sign (checked if the `authorities` of their certificates are known), or
    that are above the rate limit go to the journal; `counts` counts them, and the inbox's verdicts, by status or reason.
    A server that `yields` gives the fleet to one that does not. With `workers` other processes receive the reports.
    `director` signs what is sent to single devices; None: nothing is signed.
    """

    def __init__(
        self,
        connect: ServerConnect,
        journal: Journal,
        *,
        takeover: bool = False,
        yields: bool = False,
        workers: bool = False,
        director: SignsForDevices | None = None,
        authorities: Authorities = (),
        limits: LeaseLimits = LIMITS,
    ) -> None:
        self.journal, self.director = journal, director
        self.statements = Statements(journal, authorities)
        self.counts: Counter[str] = Counter()
        self.topics = Topics(journal.fleet)
        self.boot = secrets.token_hex(4)
        self.epoch = 0
        self.registry = ""  # the id of the registry, for the retained state
        self.malformed = MalformedPackets()
        self.connect, self.workers = connect, workers
        self._takeover, self._yields = takeover, yields
        topics = self.topics
        own = tuple(topics.up("+", kind, "#") for kind in UP if kind not in REPORTS)
        self._patterns = own if workers else (topics.up("+", "#"),)  # workers receive the reports
        self._limits = limits
        self._handlers: dict[str, list[Handler]] = defaultdict(list)
        self._on_connected: list[Callable[[bool], None]] = []
        self._rate_limit = RateLimit(topics, journal.record_excess, journal.blocked)
        self._return_s = 1.0
        self._closing = threading.Event()
        self._events: queue.Queue[Event | None] = queue.Queue(limits.max_waiting_packets)
        self._connected = threading.Event()
        self._steady = True  # the first connection was never lost
        self._lost = ""
        self._commands = 0
        self._handlers["server_state"].append(self._on_server_state)
        self._thread = threads.lasting(self._receive, "edge-fl-server", stopped=self._closing)
        self._background = ThreadPoolExecutor(1, "edge-fl-background")
        self._tasks: set[str] = set()
        self.transport: Transport | None = None

    def on(self, kind: str, handler: Handler) -> None:
        """Call `handler` for every message of one kind (`edge_fl.wire.topics.Address.kind`)."""
        self._handlers[kind].append(handler)

    def on_connected(self, handler: Callable[[bool], None]) -> None:
        """Call `handler` in the background after every connection, to publish retained messages again.

        Its argument is true if the broker does not know the session: then all retained messages may be lost.
        """
        self._on_connected.append(handler)

    def run_in_background(self, name: str, task: Callable[[], None]) -> None:
        """Run a task on the background thread, one after the other; skip it if a task of that name is already queued."""
        if name not in self._tasks:
            self._tasks.add(name)
            self._background.submit(
                threads.guarded(partial(self._run_task, name, task), f"edge-fl-background, {name}")
            )

    def open(self) -> None:
        """Connect and take the lease. Raises ConnectError without a broker, or if another server is online."""
        state = server_state(self.connect, self.topics, self._limits)
        replaces = self._takeover or (state and state.yields and not self._yields)
        if state and state.online and not replaces:
            if is_alive(self.connect, self.topics, state.boot, self._limits):
                raise ConnectError(
                    f"fleet {self.topics.fleet!r}: another server (boot {state.boot}, epoch {state.epoch}) is online, expected none"
                    " (--takeover replaces it)",
                    consequence="this server was not started",
                )
            log.warning(
                "fleet %r: the retained state of server %s says online, but it published no beat for %g s; replacing it",
                self.topics.fleet,
                state.boot,
                self._limits.lease_s,
            )
        self.epoch = state.epoch + 1 if state else 1
        self.transport = self.connect(client_id(self.topics.fleet), self._state(online=False), self._deliver)
        self._thread.start()
        threads.lasting(self._publish_beats, "edge-fl-beat", stopped=self._closing).start()
        self.transport.wait_connected(self._limits.connect_s)
        if not self._connected.wait(self._limits.connect_s):
            raise ConnectError(
                f"fleet {self.topics.fleet!r}: connected, but the receive thread did not start",
                consequence="stopped",
            )

    def close(self) -> None:
        """Publish the state "offline" and disconnect; later calls do nothing."""
        self._closing.set()
        transport, self.transport = self.transport, None
        if transport is None:
            return
        try:
            if not self._lost:
                transport.publish(self._state(online=False))
                transport.drain(self._limits.drain_s)
        except DeadlineError as error:
            log.warning("closing the connection: %s", error)
        finally:
            transport.close()
            self._background.shutdown(cancel_futures=True)
            self._events.put(None)
            self._thread.join(self._limits.drain_s)

    def spread_returns(self, devices: int) -> None:
        """Publish over how many seconds `devices` devices should spread their reconnections."""
        needed_s = min(max(devices / self._limits.returns_per_s, 1.0), self._limits.max_return_s)
        if needed_s > 2 * self._return_s:
            self._return_s = needed_s
            self.publish_packet(self._state(online=True))

    def publish(
        self, topic: str, message: Struct, *, retain: bool = False, expiry_s: float | None = None
    ) -> None:
        """Publish a message. Raises ProtocolError if it does not fit the wire."""
        expiry = None if expiry_s is None else max(1, round(expiry_s))
        self.publish_packet(Packet(topic, encode(message), retain, expiry_s=expiry))

    def publish_packet(self, packet: Packet) -> None:
        """Publish a packet unchanged; ignored after `close`."""
        if self.transport:
            self.transport.publish(packet)

    def clear_retained(self, topic: str) -> None:
        """Clear the retained message of a topic."""
        self.publish_packet(Packet(topic, b"", retain=True))

    def signed(self, kind: str, device: str, message: M, *, lasts: bool = False) -> M:
        """Return the message as the director signs it; unsigned without a director or its key."""
        if self.director is None:
            return message
        try:
            return self.director.sign(kind, device, message, lasts=lasts)
        except EdgeFLError as error:  # devices that have seen a signed one reject it by name
            log.error("%s: %s sent without a signature: %s", device, kind, error)
            return message

    def request_rebirth(self, device: str) -> None:
        """Request a device to publish its capability and state again."""
        self._commands += 1
        command = Command(f"{self.boot}-{self._commands}", "rebirth")
        command = self.signed("cmd", device, command, lasts=True)
        self.publish(self.topics.down(device, "cmd"), command, expiry_s=self._limits.command_expiry_s)

    @property
    def lost(self) -> str:
        """Why the connection has ended for good: another server may have the fleet; "" while it has not."""
        return self._lost

    def check(self) -> None:
        """Raise ConnectError if the connection has ended for good."""
        if self._lost:
            raise ConnectError(f"fleet {self.topics.fleet!r}: {self._lost}", consequence="this server stops")

    def _state(self, *, online: bool) -> Packet:
        state = ServerState(
            online,
            self.boot,
            self.epoch,
            return_s=self._return_s,
            yields=self._yields,
            registry=self.registry,
        )
        return Packet(self.topics.server("state"), encode(state), retain=True)

    def _deliver(self, event: Event) -> None:
        """Queue an event, on the transport's thread; a full queue makes the broker wait."""
        if not isinstance(event, Packet) or self._rate_limit.admits(event):
            self._events.put(event)

    def _receive(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._handle(event)
            except EdgeFLError as error:
                self.journal.lines.write(log, logging.WARNING, self._sender(event), "server: %s", error)
            except Exception:
                text, kind = "server: a handler failed on %s", type(event).__name__
                self.journal.lines.write(log, logging.ERROR, self._sender(event), text, kind, exc_info=True)

    def _sender(self, event: Event) -> str:
        """The device that an event is from; "" for all others."""
        return one_line(self.topics.sender(event.topic)) if isinstance(event, Packet) else ""

    def _handle(self, event: Event) -> None:
        match event:
            case Packet():
                self._receive_packet(event)
            case Connected():
                self._on_connection(fresh=not (event.session_present and self._connected.is_set()))
            case Disconnected(reason, final=True):
                self.end(f"the broker ended the connection ({reason})")
            case Disconnected() if self._yields:  # a new connection would end that of a run's server
                self.end(str(event))
            case Disconnected():
                self._steady = False
                log.warning("server: %s; connecting again", event)

    def _on_connection(self, *, fresh: bool) -> None:
        if (transport := self.transport) is None:
            return
        self.statements.connected()
        # Subscribed first: a newer server's retained state must arrive before this one replaces it.
        transport.subscribe(self.topics.server("state"))
        transport.publish(self._state(online=True))
        if fresh:
            for pattern in self._patterns:
                transport.subscribe(pattern)
        for number, handler in enumerate(self._on_connected):
            self.run_in_background(f"connected {number}", partial(handler, fresh))
        self._connected.set()

    def _publish_beats(self) -> None:
        while not self._closing.wait(self._limits.beat_s):
            if not self._lost:
                beat = encode(Beat(self.boot, self.epoch))
                self.publish_packet(Packet(self.topics.server("beat"), beat, qos=0))

    def _run_task(self, name: str, task: Callable[[], None]) -> None:
        self._tasks.discard(name)
        try:
            task()
        except EdgeFLError as error:
            log.warning("server: %s", error)

    def _on_server_state(self, received: ReceivedMessage) -> None:
        """Yield to a newer server, which has the lease: two servers of one name would keep disconnecting each other."""
        other = received.message
        if not isinstance(other, ServerState) or (other.epoch, other.boot) <= (self.epoch, self.boot):
            if not received.retained and getattr(other, "boot", "") != self.boot:
                self._restore_state()
            return
        if other.epoch >= MAX_EPOCH:
            log.warning("srv/state: epoch %d, expected less than %d; ignored", other.epoch, MAX_EPOCH)
            self._restore_state()
            return
        if self._steady and not other.online:
            # An earlier server's state, which arrived too late to be read before connecting.
            self.epoch = other.epoch + 1
            self.publish_packet(self._state(online=True))
        else:
            self.end(f"another server (boot {other.boot}, epoch {other.epoch}) took over")

    def _restore_state(self) -> None:
        """Publish the retained state again, which something else replaced: a late will, or what another client sent."""
        self.run_in_background("state", lambda: self.publish_packet(self._state(online=True)))

    def end(self, reason: str) -> None:
        """End the connection for good, which `check` reports; the state "offline" is not published, it would replace the other server's."""
        self._lost = reason
        if self.transport:
            self.transport.close()

    def _receive_packet(self, packet: Packet) -> None:
        try:
            address = self.topics.parse(packet.topic)
            if address.device and role_of(address.device) != "device":
                raise ProtocolError(f"{address.device!r} is not a device name")
            received = ReceivedMessage(address, _content(address.kind, packet), packet.retain)
            self.statements.require(address, packet.payload, received.message)
        except ForgedError as error:
            if error.why != Failure.OUTDATED:
                self.statements.reject(address, error)
                self.counts[error.why] += 1
            if packet.retain:
                self.request_rebirth(address.device)  # the device may have sent another one since
            return
        except ProtocolError as error:
            if packet.topic == self.topics.server("state"):
                self._restore_state()
            sender, kind = self.topics.sender(packet.topic), kind_of(packet.topic)
            self.malformed.add(sender, packet.topic, error, self.journal.lines)
            self.counts[Failure.MALFORMED] += 1
            if sender and not self.journal.blocked(sender):
                self.journal.reject(sender, "", 0, one_line(kind[:32]), Failure.MALFORMED, str(error))
            return
        for handler in self._handlers[address.kind]:
            handler(received)


def client_id(fleet: str) -> str:
    """The server's MQTT client id: one per fleet, so that several fleets can share a broker."""
    return f"server-{fleet}"


def _content(kind: str, packet: Packet) -> Struct | bytes | None:
    if not packet.payload:
        return None
    if kind == "blob":
        if packet.content_type != SAFETENSORS:
            raise ProtocolError(f"content type {packet.content_type!r}, expected {SAFETENSORS!r}")
        return packet.payload
    if kind in ("sum_chunk", "query_chunk"):  # queries are read by the command that sent them
        return packet.payload
    if kind not in MESSAGES:
        raise ProtocolError(f"unexpected message of kind {kind!r}")
    return decode_cleaned(packet.payload, MESSAGES[kind])
