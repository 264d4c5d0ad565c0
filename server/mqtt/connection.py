"""The server's connection: one server per fleet, one receive thread, and every message either understood or counted.

Before it connects, a server reads the retained srv/state: another one that is online stands in its way (the lease). Its own state is its
will, so that devices learn of a crash from the broker. On every connection it says again that it is there, and on a broker that has
forgotten it, everything else too. Packets become (address, message) pairs on the receive thread and go to the handlers of their kind;
a packet that breaks the protocol is counted by its sender and goes no further. What has to wait for the broker runs aside, on a third
thread.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from msgspec import Struct

from edge_fl.errors import ConnectError, DeadlineError, EdgeFLError, ProtocolError
from edge_fl.wire.messages import MESSAGES, Beat, Command, ServerState, decode, encode
from edge_fl.wire.topics import Address, Topics, role_of
from edge_fl.wire.transport import SAFETENSORS, Connected, Disconnected, Event, Packet, Transport
from server.mqtt.retained import Connect, Limits, is_alive, read_retained

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heard:
    """A message as it came: who and what its topic says, and its content; None where a retained one was cleared."""

    address: Address
    message: Struct | bytes | None
    retained: bool = False


Handler = Callable[[Heard], None]


class ServerConnection:
    """`on`, `on_refused` and `on_return` register handlers, then `open` connects. Handlers run on the receive thread and must not wait."""

    def __init__(
        self,
        connect: Connect,
        fleet: str,
        *,
        takeover: bool = False,
        workers: bool = False,
        limits: Limits = Limits(),
    ) -> None:
        self.topics = Topics(fleet)
        self.boot = secrets.token_hex(4)
        self.epoch = 0
        self.refused: Counter[str] = Counter()  # packets that broke the protocol, by "DEVICE KIND"
        self._connect = connect
        self._takeover = takeover
        topics = self.topics
        own = (topics.state("+"), topics.meta("+"), topics.request("+"), topics.log("+"))
        self._patterns = own if workers else (topics.up(),)  # workers take the reports
        self._limits = limits
        self._handlers: dict[str, list[Handler]] = defaultdict(list)
        self._refusals: list[Callable[[str, str, str], None]] = []
        self._returns: list[Callable[[bool], None]] = []
        self._return_s = 1.0
        self._closing = threading.Event()
        self._waiting: queue.Queue[Event | None] = queue.Queue(limits.max_waiting_packets)
        self._born = threading.Event()
        self._steady = True  # the first connection still stands
        self._lost = ""
        self._commands = 0
        self._handlers["server_state"].append(self._meet)
        self._thread = threading.Thread(target=self._receive, name="edge-fl-server", daemon=True)
        self._aside = ThreadPoolExecutor(1, "edge-fl-aside")
        self._errands: set[str] = set()
        self.transport: Transport | None = None

    def on(self, kind: str, handler: Handler) -> None:
        """Calls `handler` for every message of one kind (`edge_fl.wire.topics.Address.kind`)."""
        self._handlers[kind].append(handler)

    def on_return(self, say_again: Callable[[bool], None]) -> None:
        """Calls `say_again`, aside, after every connection: what the broker retains may be older than what we said last.

        Its argument says whether the broker does not know us at all; then everything retained there may be gone.
        """
        self._returns.append(say_again)

    def on_refused(self, handler: Callable[[str, str, str], None]) -> None:
        """Calls `handler` with the sender, the kind and what was wrong, for every packet that broke the protocol."""
        self._refusals.append(handler)

    def aside(self, name: str, errand: Callable[[], None]) -> None:
        """Runs `errand` on a thread that may wait, one after the other; does nothing while one of that name waits already."""
        if name not in self._errands:
            self._errands.add(name)
            self._aside.submit(self._run_errand, name, errand)

    def open(self) -> None:
        """Connects and takes the lease. Raises ConnectError when there is no broker, or another server is online."""
        state = self._read_state()
        if state and state.online and not self._takeover:
            if is_alive(self._connect, self.topics, state.boot, self._limits):
                raise ConnectError(
                    f"fleet {self.topics.fleet!r}: another server (boot {state.boot}, epoch {state.epoch}) is online, expected none;"
                    " this one was not started (--takeover replaces it)"
                )
            log.warning(
                "fleet %r: server %s is said to be online, but gave no sign of life for %g s; going on in its place",
                self.topics.fleet,
                state.boot,
                self._limits.lease_s,
            )
        self.epoch = state.epoch + 1 if state else 1
        self.transport = self._connect(
            client_id(self.topics.fleet), self._state(online=False), self._waiting.put
        )
        self._thread.start()
        threading.Thread(target=self._beat, name="edge-fl-beat", daemon=True).start()
        self.transport.wait_connected(self._limits.connect_s)
        if not self._born.wait(self._limits.connect_s):
            raise ConnectError(
                f"fleet {self.topics.fleet!r}: connected, but the server did not start to listen; stopped"
            )

    def expect(self, devices: int) -> None:
        """So many devices may come back at once; they are told over how long to spread."""
        needed_s = min(max(devices / self._limits.returns_per_s, 1.0), self._limits.max_return_s)
        if needed_s > 2 * self._return_s:
            self._return_s = needed_s
            self.publish(self._state(online=True))

    def say(
        self, topic: str, message: Struct, *, retain: bool = False, expiry_s: float | None = None
    ) -> None:
        """Publishes one message. Raises ProtocolError when it does not fit the wire."""
        self.publish(
            Packet(
                topic, encode(message), retain, expiry_s=None if expiry_s is None else max(1, round(expiry_s))
            )
        )

    def forget(self, topic: str) -> None:
        """Clears what is retained on a topic."""
        self.publish(Packet(topic, b"", retain=True))

    def publish(self, packet: Packet) -> None:
        """Publishes a packet as it is; after the end of the connection, nothing."""
        if self.transport:
            self.transport.publish(packet)

    def ask_rebirth(self, device: str) -> None:
        """Asks a device to say again who and how it is."""
        self._commands += 1
        command = Command(f"{self.boot}-{self._commands}", "rebirth")
        self.say(self.topics.command(device), command, expiry_s=self._limits.command_expiry_s)

    def check(self) -> None:
        """Raises ConnectError when the connection is over for good."""
        if self._lost:
            raise ConnectError(f"fleet {self.topics.fleet!r}: {self._lost}; this server stops")

    def close(self) -> None:
        """Says goodbye and disconnects; later calls do nothing."""
        self._closing.set()
        transport, self.transport = self.transport, None
        if transport is None:
            return
        try:
            if not self._lost:
                transport.publish(self._state(online=False))
                transport.drain(self._limits.drain_s)
        except DeadlineError as error:
            log.warning("goodbye: %s", error)
        finally:
            transport.close()
            self._aside.shutdown(cancel_futures=True)
            self._waiting.put(None)
            self._thread.join(self._limits.drain_s)

    def _state(self, *, online: bool) -> Packet:
        state = ServerState(online, self.boot, self.epoch, return_s=self._return_s)
        return Packet(self.topics.server_state(), encode(state), retain=True)

    def _read_state(self) -> ServerState | None:
        topic = self.topics.server_state()
        payload = read_retained(self._connect, [topic], self._limits).get(topic)
        try:
            return decode(payload, ServerState) if payload else None
        except ProtocolError as error:
            log.warning("srv/state as found: %s", error)
            return None

    def _receive(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._take(event)
            except EdgeFLError as error:
                log.warning("server: %s", error)
            except Exception:
                log.exception(
                    "server: a handler failed on %s; the next message follows", type(event).__name__
                )

    def _take(self, event: Event) -> None:
        match event:
            case Packet():
                self._hear(event)
            case Connected():
                self._be_born(fresh=not (event.session_present and self._born.is_set()))
            case Disconnected(reason, final=True):
                self._end(f"the broker ended the connection ({reason})")
            case Disconnected(reason):
                self._steady = False
                log.warning("server: connection lost (%s); trying again", reason)

    def _be_born(self, *, fresh: bool) -> None:
        if (transport := self.transport) is None:
            return
        # First, so that a newer server's state is read before ours replaces it.
        transport.subscribe(self.topics.server_state())
        transport.publish(self._state(online=True))
        if fresh:
            for pattern in self._patterns:
                transport.subscribe(pattern)
        for number, say_again in enumerate(self._returns):
            self.aside(f"return {number}", partial(say_again, fresh))
        self._born.set()

    def _beat(self) -> None:
        while not self._closing.wait(self._limits.beat_s):
            if not self._lost:
                self.publish(Packet(self.topics.server_beat(), encode(Beat(self.boot, self.epoch)), qos=0))

    def _run_errand(self, name: str, errand: Callable[[], None]) -> None:
        self._errands.discard(name)
        try:
            errand()
        except EdgeFLError as error:
            log.warning("server: %s", error)
        except Exception:
            log.exception("server: %s failed", name)

    def _meet(self, heard: Heard) -> None:
        """Another server's state. The newer one has the lease; since both have one name and throw each other out, the older must yield."""
        other = heard.message
        if not isinstance(other, ServerState) or (other.epoch, other.boot) <= (self.epoch, self.boot):
            return
        if self._steady and not other.online:
            # It stood there before us, but came too late to be read at the start.
            self.epoch = other.epoch + 1
            self.publish(self._state(online=True))
        else:
            self._end(f"another server (boot {other.boot}, epoch {other.epoch}) took over")

    def _end(self, reason: str) -> None:
        """It is over for good: whoever waits is told by `check`. The will stays unsaid, it would speak for the other server too."""
        self._lost = reason
        if self.transport:
            self.transport.close()

    def _hear(self, packet: Packet) -> None:
        try:
            address = self.topics.parse(packet.topic)
            if address.device and role_of(address.device) != "device":
                raise ProtocolError(f"{address.device!r} is no name of a device")
            heard = Heard(address, _content(address.kind, packet), packet.retain)
        except ProtocolError as error:
            kind = packet.topic.split("/")[6:7]  # behind efl/1/FLEET/d/DEVICE/up
            sender = self.topics.sender(packet.topic)
            self.refused[" ".join([sender, *kind])[:80]] += 1
            log.warning("%s: %s", packet.topic, error)
            for refused in self._refusals:
                refused(sender, "".join(kind)[:32], str(error))
            return
        for handler in self._handlers[address.kind]:
            handler(heard)


def client_id(fleet: str) -> str:
    """The server's name among a broker's clients: one per fleet, so that two fleets on one broker do not throw each other out."""
    return f"server-{fleet}"


def _content(kind: str, packet: Packet) -> Struct | bytes | None:
    if not packet.payload:
        return None
    if kind == "blob":
        if packet.content_type != SAFETENSORS:
            raise ProtocolError(f"content type {packet.content_type!r}, expected {SAFETENSORS!r}")
        return packet.payload
    if kind not in MESSAGES:
        raise ProtocolError(f"a message of kind {kind!r} is not for the server")
    return decode(packet.payload, MESSAGES[kind])
