"""What both sides of a secure sum know: its members and their signatures, the threshold, and what is signed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import SecureSumError
from edge_fl.failures import Failure
from edge_fl.secure import signatures
from edge_fl.secure.signatures import Authorities, Signer, canonical
from edge_fl.wire.identity import IdentityError
from edge_fl.wire.messages import MAX_SUM_DEVICES, SumKeys, SumRequest


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


def threshold(request: SumRequest, devices: int) -> int:
    """How many of a cohort must remain: the requested share, more than half, and the minimum."""
    return max(math.ceil(request.threshold * devices - 1e-9), devices // 2 + 1, request.minimum)


@dataclass(frozen=True)
class SumTerms:
    """One secure sum of a fleet."""

    fleet: str
    id: str
    request: SumRequest

    def keys_content(self, name: str, keys: SumKeys) -> object:
        """What a device signs with its keys."""
        return ["keys", self.fleet, self.id, self.request, name, keys.channel, keys.mask, keys.commitment]

    def require_keys(self, name: str, keys: SumKeys, authorities: Authorities) -> None:
        """Raise SecureSumError unless the device `name` signed these keys for this sum."""
        require_signed(keys.certificate, name, self.keys_content(name, keys), keys.signature, authorities)

    def session(self, keys: Mapping[str, SumKeys]) -> bytes:
        """A hash of everything that the cohort agreed on."""
        return hashlib.sha256(canonical([self.fleet, self.id, self.request, dict(keys)])).digest()

    def require_cohort(self, keys: Mapping[str, SumKeys]) -> None:
        """Raise SecureSumError for a cohort that is too small or too large."""
        if not self.request.minimum <= len(keys) <= MAX_SUM_DEVICES:
            raise SecureSumError(
                f"{len(keys)} devices take part, expected {self.request.minimum} to {MAX_SUM_DEVICES}",
                Failure.TOO_FEW,
            )


def survivors_content(session: bytes, survivors: Collection[str]) -> object:
    """What a device signs before it reveals shares."""
    return ["survivors", session, sorted(survivors)]


def require_enough(remaining: int, cohort: int, needed: int) -> None:
    """Raise SecureSumError if fewer than `needed` of a cohort remain."""
    if remaining < needed:
        raise SecureSumError(
            f"only {remaining} of {cohort} devices remained, {needed} needed", Failure.TOO_FEW
        )
