"""Verifies the server's signatures on messages to this device, and signs what the device reports about itself.

The server signs with the online key that the signed metadata of releases name. A message that no known key signed waits until the metadata
are fetched again, because the key may have been replaced. The device signs with the key of its certificate, if it has one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from edge_fl.errors import ConfigError, EdgeFLError, TrustError
from edge_fl.failures import Failure
from edge_fl.fields import ServerSignature
from edge_fl.secure import signatures
from edge_fl.secure.signatures import Signer, Statement
from edge_fl.wire.identity import CERT_FILE
from edge_fl.wire.messages import MESSAGES, decode
from edge_fl.wire.topics import Address
from edge_fl.wire.transport import Packet
from edge_fl_devices.agent.events import Failed, Received
from edge_fl_devices.install.trust import Trust

log = logging.getLogger(__name__)

NUMBERS_PER_START = 2**20
ALWAYS_SIGNED = ("settings",)
"""Messages, by the kind of their topic, that no server without signatures sends."""
NEED_ROOT = (*ALWAYS_SIGNED, "sum")
"""Messages that wait for a root where none is trusted yet: a full device gets no release, with which it would trust the first one."""


@dataclass(frozen=True, slots=True)
class KeysRefreshed:
    """The signed metadata were fetched again, as far as possible; waiting messages can be verified."""


@dataclass(eq=False, slots=True)
class Verifier:
    """Verifies messages to one device; without `trust` none is verified.

    `waiting`: the last message of each kind by an unknown key, or where no root is trusted yet.
    """

    fleet: str
    device: str
    trust: Trust | None
    waiting: dict[str, tuple[Address, Packet]] = field(default_factory=dict)

    def received(self, address: Address, packet: Packet) -> Received | None:
        """The event of a packet; None if it waits for newer metadata. Raises ProtocolError."""
        self.waiting.pop(address.kind, None)
        try:
            return self._verified(address, packet)
        except TrustError as error:
            if error.why == Failure.NO_ROOT and address.kind not in NEED_ROOT:
                return Received(
                    address, _content(address, packet), packet.retain
                )  # its signature is worth nothing
            if error.why not in (Failure.WRONG_KEY, Failure.NO_ROOT):
                return self._rejected(address, packet, error)
            self.waiting[address.kind] = (address, packet)
            return None

    def refresh(self, files: Mapping[str, bytes] | Failed) -> KeysRefreshed:
        """Refresh the trusted metadata; in a worker thread."""
        try:
            if self.trust and not isinstance(files, Failed):
                self.trust.refresh(files.__getitem__)
        except (EdgeFLError, OSError) as error:
            log.warning("%s: %s", self.device, error)
        except Exception:  # the messages that wait must get their verdict all the same
            log.exception("%s: the trusted metadata could not be refreshed", self.device)
        return KeysRefreshed()

    def retried(self) -> Iterator[Received]:
        """Verify the messages that waited."""
        waiting, self.waiting = self.waiting, {}
        for address, packet in waiting.values():
            try:
                yield self._verified(address, packet)
            except TrustError as error:
                yield self._rejected(address, packet, error)

    def _verified(self, address: Address, packet: Packet) -> Received:
        """Raises TrustError for a signature that does not count."""
        message = _content(address, packet)
        signature = getattr(message, "signature", None)
        if self.trust is None or not isinstance(signature, ServerSignature):
            if self.trust and message is not None and address.kind in ALWAYS_SIGNED:
                raise TrustError(f"{address.kind}: no signature", Failure.UNSIGNED)
            return Received(address, message, packet.retain)
        content = signatures.to_device(address.kind, signature, packet.payload)
        self.trust.require_online_signature(content, signature.signatures, signature.expires)
        if (signature.fleet, signature.device) != (self.fleet, self.device):
            found = f"signed for {signature.device} of fleet {signature.fleet}"
            raise TrustError(f"{found}, expected {self.device} of {self.fleet}", Failure.MISDIRECTED)
        return Received(address, message, packet.retain, signature.number, min(signature.signatures))

    def _rejected(self, address: Address, packet: Packet, error: TrustError) -> Received:
        log.warning("%s: %s: %s; ignored", self.device, address.kind, error.message)
        return Received(address, _content(address, packet), packet.retain, rejected=error.why or "")


@dataclass(eq=False, slots=True)
class StatementSigner:
    """Signs what the device in `device` reports, with the identity in `folder`; None: it signs nothing.

    Numbers begin with `start`, which grows from start to start.
    """

    fleet: str
    device: str
    folder: Path | None
    start: int
    _count: int = 0
    _signer: Signer | None = None
    _stamp: int = 0

    def signed(self, message: Struct) -> Struct:
        """The message, signed if a device signs messages of its type. An identity that cannot be read is logged."""
        if self.folder is None or not isinstance(message, Statement):
            return message
        try:
            if (stamp := (self.folder / CERT_FILE).stat().st_mtime_ns) != self._stamp:  # renewed since
                self._signer, self._stamp = Signer.of(self.folder), stamp
        except (ConfigError, OSError, ValueError) as error:
            log.warning("%s: not signed: %s", self.device, error)
        if self._signer is None:
            return message
        self._count += 1
        number = self.start * NUMBERS_PER_START + self._count
        return signatures.stated(message, self._signer, self.fleet, self.device, number)


def _content(address: Address, packet: Packet) -> Struct | None:
    return _decoded(address.kind, packet.payload) if packet.payload else None


@functools.lru_cache(64)
def _decoded(kind: str, payload: bytes) -> Struct:
    """Decode a message; cached, because all devices of a process receive the same retained messages."""
    return decode(payload, MESSAGES[kind])
