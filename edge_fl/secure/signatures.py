"""Signatures of devices, made with the keys of their certificates.

A signature counts if a CA of the fleet signed the certificate and its name is that of the sender, which must be a device. Dates are left to
the broker: a board without a clock cannot check them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edge_fl.wire import identity
from edge_fl.wire.identity import IdentityError, Key
from edge_fl.wire.topics import role_of

Authorities = Sequence[x509.Certificate]

ALGORITHM = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class Signer:
    """A device's certificate (DER) and key."""

    certificate: bytes
    key: Key

    @classmethod
    def of(cls, folder: Path) -> "Signer":
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
