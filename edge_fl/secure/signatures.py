"""Signatures on messages: by the server for one device, and by a device about itself, with the key of its certificate.

Signed is the JSON object as it is sent, without its field `signature`: a field that the receiver does not know counts, too. Fleet, device
and kind of the message are part of it, so that no message passes for one of another device or of another kind. A broker can forge neither.

A device's signature counts if a CA of the fleet signed the certificate and its name is that of the sender, which must be a device. Dates
are left to the broker: a board without a clock cannot check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec.structs import replace

from edge_fl.errors import ProtocolError
from edge_fl.failures import Failure
from edge_fl.fields import DeviceSignature, ServerSignature
from edge_fl.wire import identity
from edge_fl.wire.identity import IdentityError, Key
from edge_fl.wire.messages import Capability, DeviceState, Report, encode
from edge_fl.wire.topics import role_of

Authorities = Sequence[x509.Certificate]

ALGORITHM = ec.ECDSA(hashes.SHA256())

Statement = DeviceState | Capability | Report
STATEMENTS: dict[type, str] = {DeviceState: "state", Capability: "meta", Report: "rpt"}
"""What a device signs, by the kind of its topic."""


@dataclass(frozen=True)
class Signer:
    """A device's certificate (DER) and key."""

    certificate: bytes
    key: Key

    @classmethod
    def of(cls, folder: Path) -> Signer:
        """Read an identity folder. Raises ConfigError."""
        identity.read(folder)
        certificate = x509.load_pem_x509_certificate((folder / identity.CERT_FILE).read_bytes())
        key = identity.load_key((folder / identity.KEY_FILE).read_bytes())
        return cls(certificate.public_bytes(serialization.Encoding.DER), key)

    def sign(self, content: object) -> bytes:
        """Sign a value of builtins and structs."""
        return self.key.sign(canonical(content), ALGORITHM)


def authorities(folder: Path) -> Authorities:
    """The CAs in an identity folder. Raises OSError, ValueError."""
    return x509.load_pem_x509_certificates((folder / identity.CA_FILE).read_bytes())


def canonical(content: object) -> bytes:
    """The bytes of a value that are signed or hashed."""
    return msgspec.json.encode(content, order="deterministic")


def require_signed(
    certificate: bytes, name: str, content: object, signature: bytes, authorities: Authorities
) -> None:
    """Raise IdentityError unless `signature` is that of the device `name` on `content`."""
    try:
        owner, key = _issued(certificate, tuple(authorities))
    except (ValueError, IdentityError) as error:
        raise IdentityError(f"{name}: unreadable certificate") from error
    if owner != name or role_of(name) != "device":
        found = f"certificate of {owner!r}" if owner else "certificate of another CA"
        raise IdentityError(f"{name}: {found}, expected this device's, from its fleet's CA")
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        key.verify(signature, canonical(content), ALGORITHM)
    except InvalidSignature as error:
        raise IdentityError(f"{name}: its signature is not on this message: forged or replayed") from error


@lru_cache(4096)
def _issued(certificate: bytes, authorities: tuple[x509.Certificate, ...]) -> tuple[str, object]:
    """Name ("" if none of the CAs signed it) and key of a certificate; cached, because a device shows the same one again and again."""
    known = x509.load_der_x509_certificate(certificate)
    issued = any(identity.is_signed_by(known, ca) for ca in authorities)
    return identity.common_name(known.subject) if issued else "", known.public_key()


class ForgedError(ProtocolError):
    """A message whose signature does not count; `why` is the failure word."""

    def __init__(self, message: str, why: Failure) -> None:
        super().__init__(message)
        self.why = why


def to_device(kind: str, signature: ServerSignature, payload: bytes) -> bytes:
    """The bytes that the server signs of the message in `payload`."""
    of = signature
    return canonical(
        ["to device", kind, of.fleet, of.device, of.number, of.expires, _unsigned_fields(payload)]
    )


def from_device(kind: str, fleet: str, device: str, number: int, payload: bytes) -> list[object]:
    """What a device signs of its message in `payload`."""
    return ["from device", kind, fleet, device, number, _unsigned_fields(payload)]


def stated(message: Statement, signer: Signer, fleet: str, device: str, number: int) -> Statement:
    """Sign a device's message."""
    content = from_device(STATEMENTS[type(message)], fleet, device, number, encode(message))
    signature = DeviceSignature(signer.certificate, number, signer.sign(content))
    return replace(message, signature=signature)


def require_stated(
    kind: str, fleet: str, device: str, signature: DeviceSignature, payload: bytes, authorities: Authorities
) -> None:
    """Raise ForgedError unless the message in `payload` is signed by the device."""
    content = from_device(kind, fleet, device, signature.number, payload)
    try:
        require_signed(signature.certificate, device, content, signature.signature, authorities)
    except IdentityError as error:
        raise ForgedError(error.message, Failure.FORGED) from error


def certificate_end(signature: DeviceSignature) -> int:
    """When the certificate of a signature that was checked ends, in seconds since 1970."""
    return int(x509.load_der_x509_certificate(signature.certificate).not_valid_after_utc.timestamp())


def _unsigned_fields(payload: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(payload)
    fields.pop("signature", None)
    return fields
