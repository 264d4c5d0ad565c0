"""Whether devices sent what arrives in their names: states, capabilities and reports, signed with the keys of their certificates.

A broker decides which topics a client may use, so without signatures it could speak for every device. A device that has signed once is
believed only with a signature, and only with a higher number than before; both survive a restart of the server. Only the will "lost",
which the broker sends by order of the device, is never signed.

Older messages of a broker that was restored from its last save do not count either, but are no attack. Three things distinguish them. They
arrive before any current message of their device and kind on the same connection. Every device that is there has lost its connection too:
it connects again, which its next state "init" says. And that newer message replaces them. So an older message after a current one is
replayed; one at the beginning of a connection is outdated, until its device turns out to have been connected all along, or does not get
its newer message through `SETTLE_S` after it returned: then that one was replayed as well. A device that does not return tells nothing.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from edge_fl.console.units import few
from edge_fl.failures import Failure
from edge_fl.secure.signatures import STATEMENTS, Authorities, ForgedError, require_stated
from edge_fl.wire.messages import Capability, DeviceState, Report
from edge_fl.wire.topics import Address
from edge_fl_server.mqtt.device_packets import one_line
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.registry import registered_devices
from edge_fl_server.registry.tables import DeviceRecord

SETTLE_S = 30.0
log = logging.getLogger(__name__)
GATHER_S = 1.0  # devices of this time share the first line
PAUSE_S = 60.0  # between two lines of one kind
FORGET_S = 3600.0  # without a message of a kind; the next one is logged again
RULE = "they do not count; %s (docs/security.md, a compromised broker)"
Numbers = dict[str, int]
"""The highest number of a device's signed messages, by kind; empty for a device that does not sign."""
DELIVERED = "an older message was delivered to the server while the device was connected"


@dataclass(slots=True)
class _Outdated:
    """A device with outdated messages of these `kinds`; `returned_s`: when a newer message of it arrived, infinity before."""

    kinds: set[str] = field(default_factory=set)
    returned_s: float = math.inf
    connected_again: bool = False


@dataclass(frozen=True)
class Standing:
    """What became of outdated messages since the last look: devices with new ones, those still open, and those that were replayed."""

    found: frozenset[str]
    waiting: frozenset[str]
    replayed: frozenset[str]


class OlderMessages:
    """The outdated messages of a fleet. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # (device, kind) with a current message on this connection
        self._current: set[tuple[str, str]] = set()
        self._open: dict[str, _Outdated] = {}
        self._found: set[str] = set()

    def connected(self) -> None:
        """Note a new connection: what arrives first may be older."""
        self._current.clear()
        for outdated in self._open.values():
            outdated.returned_s, outdated.connected_again = math.inf, False

    def is_outdated(self, device: str, kind: str) -> bool:
        """Note an older message; False if it was replayed."""
        if (device, kind) in self._current:
            return False
        self._open.setdefault(device, _Outdated()).kinds.add(kind)
        self._found.add(device)
        return True

    def current(
        self, device: str, kind: str, message: DeviceState | Capability | Report, *, newer: bool
    ) -> None:
        """Note a message that is not older; `newer`: it is not the last one that was received."""
        self._current.add((device, kind))
        if (outdated := self._open.get(device)) is None:
            return
        outdated.kinds.discard(kind)
        if newer:
            outdated.returned_s = min(outdated.returned_s, self._clock())
            outdated.connected_again |= isinstance(message, DeviceState) and message.status == "init"
        if not outdated.kinds and (outdated.connected_again or math.isinf(outdated.returned_s)):
            del self._open[device]

    def look(self) -> Standing:
        """What has changed since the last look."""
        before_s = self._clock() - SETTLE_S
        replayed = {device for device, outdated in self._open.items() if outdated.returned_s <= before_s}
        for device in replayed:
            del self._open[device]
        found, self._found = self._found, set()
        return Standing(frozenset(found), frozenset(self._open), frozenset(replayed))


@dataclass(slots=True)
class _Group:
    """The devices of one failure word, the number in its last line, when the next line is due, and when the last message came."""

    due_s: float
    seen_s: float = 0.0
    devices: set[str] = field(default_factory=set)
    logged: int = 0
    newest: str = ""


def suspects(devices: Collection[str]) -> str:
    """Whom to distrust if messages in the names of these devices do not count. A device can send such messages in its own name, too."""
    alone = ", or this device" if len(devices) == 1 else ""
    return f"distrust the broker{alone}"


class SignatureLog:
    """Lines about one fleet. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: dict[str, _Group] = {}
        self._outdated: set[str] = set()  # since all were replaced
        self._announced, self._reminded = 0, False
        self._due_s = 0.0

    def reject(self, device: str, error: ForgedError) -> None:
        """Note a message that does not count."""
        now_s = self._clock()
        group = self._groups.setdefault(error.why, _Group(now_s + GATHER_S))
        group.seen_s = now_s
        group.devices.add(device)
        group.newest = one_line(error.message)

    def advance(self, standing: Standing) -> None:
        """Log what is due."""
        now_s = self._clock()
        self._groups = {why: group for why, group in self._groups.items() if now_s - group.seen_s < FORGET_S}
        for why, group in self._groups.items():
            if len(group.devices) > group.logged and now_s >= group.due_s:
                log.warning(
                    f"%s messages of %s; the newest: %s; {RULE}",
                    why,
                    few(group.devices),
                    group.newest,
                    suspects(group.devices),
                )
                group.logged, group.due_s = len(group.devices), now_s + PAUSE_S
        self._advance_outdated(standing, now_s)

    def _advance_outdated(self, standing: Standing, now_s: float) -> None:
        if standing.found - self._outdated:
            self._due_s = now_s + GATHER_S
        self._outdated |= standing.found
        new = self._announced < len(self._outdated)
        if not self._outdated or (new and now_s < self._due_s):
            return
        if new:
            log.warning(
                "the broker delivers older messages of %s than it did before: it was restored from its last save, or replays"
                " them; they do not count, and the devices' next ones replace them",
                few(self._outdated),
            )
            self._announced, self._reminded, self._due_s = len(self._outdated), False, now_s + PAUSE_S
        if not standing.waiting:
            replayed = self._groups.get(Failure.REPLAYED)
            if replaced := self._outdated - (replayed.devices if replayed else set()):
                log.warning(
                    "%s: newer messages have replaced the older ones; the broker was restored, and nothing is lost",
                    few(replaced),
                )
            self._outdated, self._announced = set(), 0
        elif not self._reminded and now_s >= self._due_s:
            log.warning("%s not back since the broker delivered older messages", few(standing.waiting))
            self._reminded = True


class Statements:
    """The signatures of one fleet's devices, checked if the CAs of their certificates are known."""

    def __init__(self, journal: Journal, authorities: Authorities = ()) -> None:
        self._journal, self._authorities = journal, tuple(authorities)
        known: Iterable[DeviceRecord] = (
            registered_devices.listed(journal.db, journal.fleet) if authorities else ()
        )
        self._numbers: dict[str, Numbers] = {record.device: numbers_of(record) for record in known}
        self._older, self._log = OlderMessages(), SignatureLog()
        self._lock = threading.Lock()  # messages arrive on one thread, `advance` is called by another
        journal.on_written.append(self.advance)

    def connected(self) -> None:
        """Note that the server's connection is new."""
        with self._lock:
            self._older.connected()

    def reject(self, address: Address, error: ForgedError) -> None:
        """Record a message that does not count: in the log together with others, and as a rejection of its device; not of a revoked one."""
        if self._journal.blocked(address.device) == "revoked":
            return  # its retained messages are still there
        with self._lock:
            self._log.reject(address.device, error)
        self._journal.reject(address.device, "", 0, address.kind, error.why, error.message)

    def advance(self) -> None:
        """Log what is due, and record the outdated messages that were replayed."""
        with self._lock:
            standing = self._older.look()
        for device in sorted(standing.replayed):
            self.reject(Address("state", device), ForgedError(DELIVERED, Failure.REPLAYED))
        with self._lock:
            self._log.advance(standing)

    def require(self, address: Address, payload: bytes, message: Struct | bytes | None) -> None:
        """Raise ForgedError if a device that signs did not send this message, or sent it before a later one.

        Its `why` is OUTDATED for an older message that needs no attention.
        """
        if not self._authorities or not isinstance(message, DeviceState | Capability | Report):
            return
        device, kind = address.device, STATEMENTS[type(message)]
        try:
            number = self._number(device, kind, payload, message)
        except ForgedError:
            if not self._is_admitted(device):
                raise
            self._numbers[device] = {}  # the operator accepts what it sends now
            number = self._number(device, kind, payload, message)
        if number:
            newer = number > self.numbers(device).get(kind, 0)
            self._numbers.setdefault(device, {})[kind] = number
            with self._lock:
                self._older.current(device, kind, message, newer=newer)

    def numbers(self, device: str) -> Numbers:
        """The highest numbers of a device's signed messages."""
        return self._numbers.get(device, {})

    def _number(
        self, device: str, kind: str, payload: bytes, message: DeviceState | Capability | Report
    ) -> int:
        before = self.numbers(device)
        if message.signature is None:
            if before and not is_will(message):
                raise ForgedError(f"{kind} is not signed, but this device signs", Failure.UNSIGNED)
            return 0
        signature = message.signature
        require_stated(kind, self._journal.fleet, device, signature, payload, self._authorities)
        if kind != "rpt" and signature.number < before.get(kind, 0):
            with self._lock:
                outdated = self._older.is_outdated(device, kind)
            text = f"{kind} is older than one received before"
            raise ForgedError(text, Failure.OUTDATED if outdated else Failure.REPLAYED)
        return max(signature.number, before.get(kind, 0))

    def _is_admitted(self, device: str) -> bool:
        """Whether the operator reset the numbers of a device (`edge-fl fleet admit`)."""
        record = registered_devices.get(self._journal.db, self._journal.fleet, device)
        return record is not None and not numbers_of(record)


def is_will(message: Struct) -> bool:
    """Whether a message is a device's will: it says nothing but that the connection broke."""
    return isinstance(message, DeviceState) and message == DeviceState("lost", message.boot)


def numbers_of(record: DeviceRecord) -> Numbers:
    """The numbers that the registry has of a device."""
    stored = {"state": record.signed_state, "meta": record.signed_meta}
    return {kind: number for kind, number in stored.items() if number}
