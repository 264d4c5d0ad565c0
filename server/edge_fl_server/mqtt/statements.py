"""Whether devices sent what arrives in their names: states, capabilities and reports, signed with the keys of their certificates.

A broker decides which topics a client may use, so without signatures it could speak for every device. A device that has signed once is
believed only with a signature, and only with a higher number than before; both survive a restart of the server. Only the will "lost",
which the broker sends by order of the device, is never signed.

Older messages of a broker that was restored from its last save do not count either, but are no attack (`older_messages`).
"""

import threading
from collections.abc import Iterable

from msgspec import Struct

from edge_fl.failures import Failure
from edge_fl.secure.signatures import STATEMENTS, Authorities, ForgedError, require_stated
from edge_fl.wire.messages import Capability, DeviceState, Report
from edge_fl.wire.topics import Address
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.older_messages import OlderMessages
from edge_fl_server.mqtt.signature_log import SignatureLog
from edge_fl_server.registry import devices
from edge_fl_server.registry.records import DeviceRecord

Numbers = dict[str, int]
"""The highest number of a device's signed messages, by kind; empty for a device that does not sign."""
DELIVERED = "an older message was delivered to the server while the device was connected"


class Statements:
    """The signatures of one fleet's devices, checked if the CAs of their certificates are known."""

    def __init__(self, journal: Journal, authorities: Authorities = ()) -> None:
        self._journal, self._authorities = journal, tuple(authorities)
        known: Iterable[DeviceRecord] = devices.listed(journal.db, journal.fleet) if authorities else ()
        self._numbers: dict[str, Numbers] = {record.device: numbers_of(record) for record in known}
        self._older, self._log = OlderMessages(), SignatureLog()
        self._lock = threading.Lock()  # messages arrive on one thread, `advance` is called by another
        journal.on_written.append(self.advance)

    def connected(self) -> None:
        """Note that the server's connection is new."""
        with self._lock:
            self._older.connected()

    def reject(self, address: Address, error: ForgedError) -> None:
        """Record a message that does not count: in the log together with others, and as a rejection of its device."""
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
        record = devices.get(self._journal.db, self._journal.fleet, device)
        return record is not None and not numbers_of(record)


def is_will(message: Struct) -> bool:
    """Whether a message is a device's will: it says nothing but that the connection broke."""
    return isinstance(message, DeviceState) and message == DeviceState("lost", message.boot)


def numbers_of(record: DeviceRecord) -> Numbers:
    """The numbers that the registry has of a device."""
    stored = {"state": record.signed_state, "meta": record.signed_meta}
    return {kind: number for kind, number in stored.items() if number}
