"""Signatures with the enrolled identities: who sent the keys of a secure sum, and what was signed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import SecureSumError
from edge_fl.failures import Failure
from edge_fl.secure import signatures
from edge_fl.secure.signatures import Authorities, Signer, canonical
from edge_fl.wire.identity import IdentityError

__all__ = ["Authorities", "Member", "canonical", "require_signed"]


@dataclass(frozen=True)
class Member(Signer):
    """A device's certificate (DER) and key, and the CAs of its fleet."""

    authorities: Authorities

    @classmethod
    def of(cls, folder: Path) -> Member:
        """Read an identity folder. Raises ConfigError."""
        own = Signer.of(folder)
        return cls(own.certificate, own.key, signatures.authorities(folder))


def require_signed(
    certificate: bytes, name: str, content: object, signature: bytes, authorities: Authorities
) -> None:
    """Raise SecureSumError unless `signature` is that of the device `name` on `content`."""
    try:
        signatures.require_signed(certificate, name, content, signature, authorities)
    except IdentityError as error:
        raise SecureSumError(error.message, Failure.FORGED) from error
