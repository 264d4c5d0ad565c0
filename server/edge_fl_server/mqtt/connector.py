"""Connect clients to a broker: the server, and readers with a second identity, which read what is retained before the server connects.

A broker that names clients by their certificates disconnects the older of two clients with the same name. A reader must therefore not use
the server's identity, so the identity folders of server and operator contain a second one, `reader`, which may not publish. A device's
identity is not accepted: the broker would hide the fleet from it and disconnect the device.
"""

import fcntl
import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

from edge_fl.errors import ConfigError, ConnectError, ProtocolError
from edge_fl.files.paths import text
from edge_fl.secure import signatures
from edge_fl.secure.signatures import Authorities
from edge_fl.wire import identity
from edge_fl.wire.messages import Beat, ServerState, decode
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.roles import PERSON_ROLES, may
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connected, Disconnected, Event, Listener, Packet, Transport

log = logging.getLogger(__name__)

READER = "reader"
POLL_S = 0.1
SERVER_ROLES = ("server", "reader", "admin", "worker", *PERSON_ROLES)
MAX_EPOCH = 2**30  # sequence numbers (`edge_fl_server.mqtt.journal`) of later epochs do not fit the registry


@dataclass(frozen=True)
class LeaseLimits:
    """Time limits and sizes of the server's connection and of readers.

    The server publishes a beat every `beat_s`; without one for `lease_s` another server may take the fleet over. Reconnecting devices
    are spread so that at most `returns_per_s` return at once.
    """

    connect_s: float = 30.0
    settle_s: float = 0.5
    read_s: float = 10.0
    drain_s: float = 10.0
    max_waiting_packets: int = 4096
    command_expiry_s: int = 60
    beat_s: float = 1.0
    lease_s: float = 5.0
    returns_per_s: float = 100.0
    max_return_s: float = 300.0


LIMITS = LeaseLimits()


class ServerConnect(Protocol):
    """Connect a client to the broker, such as `partial(MqttTransport, endpoint)` or `partial(InMemoryTransport, broker)`."""

    def __call__(
        self,
        client_id: str,
        will: Packet | None,
        deliver: Listener,
        *,
        session_expiry_s: int = ...,
        clean_start: bool = ...,
    ) -> Transport: ...


@contextmanager
def passing_client(connect: ServerConnect, name: str) -> Iterator[tuple[Transport, queue.SimpleQueue[Event]]]:
    """A client for the block, of which the broker keeps nothing, with its events; other letters follow its name each time."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    id = f"{name}-{secrets.token_hex(4)}"
    transport = connect(id, None, events.put, session_expiry_s=0, clean_start=True)
    try:
        yield transport, events
    finally:
        transport.close()


def read_retained(
    connect: ServerConnect, patterns: Sequence[str], limits: LeaseLimits = LIMITS
) -> dict[str, bytes]:
    """Read the retained messages on `patterns` -> payloads by topic. Raises ConnectError.

    A broker does not mark the end of retained messages: once it has acknowledged the subscriptions, reading ends after `settle_s`
    without one, at most after `read_s`.
    """
    payloads: dict[str, bytes] = {}
    with passing_client(connect, "reader") as (transport, events):
        transport.wait_connected(limits.connect_s)
        until, wait_s = time.monotonic() + limits.read_s, limits.read_s
        while time.monotonic() < until:
            try:
                event = events.get(timeout=wait_s)
            except queue.Empty:
                break
            match event:
                case Connected():  # also after another reader of the same name disconnected this one
                    for pattern in patterns:
                        transport.subscribe(pattern)
                    transport.drain(max(until - time.monotonic(), 0.0))  # a slow link's answer is no silence
                    wait_s = limits.settle_s
                case Disconnected():
                    wait_s = limits.read_s
                case Packet() if event.payload:
                    payloads[event.topic] = event.payload
    return payloads


def server_state(connect: ServerConnect, topics: Topics, limits: LeaseLimits) -> ServerState | None:
    """The retained state of the last server; None if there is none or it is invalid. Raises ConnectError."""
    topic = topics.server("state")
    payload = read_retained(connect, [topic], limits).get(topic)
    try:
        state = decode(payload, ServerState) if payload else None
        if state and state.epoch >= MAX_EPOCH:
            raise ProtocolError(f"epoch {state.epoch}, expected less than {MAX_EPOCH}")
        return state
    except ProtocolError as error:
        log.warning("retained srv/state: %s", error)
        return None


def online_server(connect: ServerConnect, topics: Topics, limits: LeaseLimits = LIMITS) -> str:
    """The boot id of the server that is online; "" if none is. Raises ConnectError.

    A retained "online" remains where a server and its broker ended without notice: only a beat counts.
    """
    state = server_state(connect, topics, limits)
    return state.boot if state and state.online and is_alive(connect, topics, state.boot, limits) else ""


def is_alive(connect: ServerConnect, topics: Topics, boot: str, limits: LeaseLimits) -> bool:
    """Whether the server `boot` publishes a beat within `lease_s`."""
    with passing_client(connect, "reader") as (transport, events):
        transport.wait_connected(limits.connect_s)
        transport.subscribe(topics.server("beat"))
        until = time.monotonic() + limits.lease_s
        while (left := until - time.monotonic()) > 0:
            try:
                event = events.get(timeout=left)
                if isinstance(event, Packet) and decode(event.payload, Beat).boot == boot:
                    return True
            except queue.Empty:
                break
            except ProtocolError as error:
                log.warning("srv/beat: %s", error)
    return False


def denied(folder: Path | str | None) -> Path | None:
    """The file with the names of revoked devices in the folder of the server's identity; None without an identity."""
    return Path(folder) / identity.DENIED_FILE if folder else None


def connector(host: str, port: int = 0, folder: Path | str | None = None) -> ServerConnect:
    """A function that connects clients to one broker. Raises ConfigError for an unusable identity."""
    if (own := identity.certificate_in(folder)) and own.role not in SERVER_ROLES:
        raise ConfigError(
            f"{folder}: the identity of {own.name!r} ({own.role}), expected that of the server or the operator, which may read the"
            " whole fleet (runs/identities/operator)"
        )
    server_loop = cache(MqttLoop)
    server = reader = identity.endpoint(host, port, folder)
    if folder and (Path(folder) / READER).exists():
        reader = identity.endpoint(host, port, Path(folder) / READER)

    def connect(
        client_id: str,
        will: Packet | None,
        deliver: Listener,
        *,
        session_expiry_s: int = 86400,
        clean_start: bool = False,
    ) -> MqttTransport:
        """Connect the server if there is a will, otherwise a reader.

        The server has its own event loop: its queue is bounded, and a full queue must not delay other connections.
        """
        return MqttTransport(
            server if will else reader,
            client_id,
            will,
            deliver,
            loop=server_loop() if will else None,
            session_expiry_s=session_expiry_s,
            clean_start=clean_start,
        )

    return connect


def operator_connector(host: str, port: int = 0, folder: Path | str | None = None) -> ServerConnect:
    """A function that connects a client which may query devices. Raises ConfigError for an identity that may not."""
    if (own := identity.certificate_in(folder)) and not (own.role == "admin" or may([own.role], "diagnose")):
        raise ConfigError(
            f"{folder}: the identity of {own.name!r} ({own.role}), expected that of an operator (runs/identities/operator)"
        )
    return partial(MqttTransport, identity.endpoint(host, port, folder))


@contextmanager
def sole_user(folder: Path | str | None, deadline_s: float, notify: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other command of this machine uses an identity with a certificate, and keep others waiting during the block.

    Its name is the client id, so that the broker would end the other one's connection. Raises ConnectError after `deadline_s`.
    """
    own = identity.certificate_in(folder)
    if own is None:
        yield
        return
    until, told = time.monotonic() + deadline_s, False
    with (own.folder / identity.CA_FILE).open("rb") as file:  # stays where certificate and key are renewed
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise ConnectError(
                        f"{text(own.folder)}: another command has used the identity {own.name} for {deadline_s:g} s; expected to be"
                        " the only one, or an identity for each person",
                        "the device was not asked",
                    ) from error
                if not told:
                    notify(f"waiting for another command with the identity {own.name}")
                told = True
                time.sleep(POLL_S)
        yield


def fleet_authorities(folder: Path | str | None) -> Authorities:
    """The CAs that sign the certificates of the fleet's devices; none without a certificate in the folder. Raises ConfigError."""
    return signatures.authorities(Path(folder)) if folder and identity.certificate_in(folder) else ()
