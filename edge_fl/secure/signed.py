"""What is signed of a message: by the server for one device, and by a device about itself. A broker can forge neither.

Signed is the JSON object as it is sent, without its field `signature`: a field that the receiver does not know counts, too. Fleet, device
and kind of the message are part of it, so that no message passes for one of another device or of another kind.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from edge_fl.errors import ProtocolError
from edge_fl.failures import Failure
from edge_fl.fields import DeviceSignature, ServerSignature
from edge_fl.secure.signatures import Authorities, Signer, canonical, require_signed
from edge_fl.wire.identity import IdentityError
from edge_fl.wire.messages import Capability, DeviceState, Report, encode

Statement = DeviceState | Capability | Report
STATEMENTS: dict[type, str] = {DeviceState: "state", Capability: "meta", Report: "rpt"}
"""What a device signs, by the kind of its topic."""


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


def _unsigned_fields(payload: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(payload)
    fields.pop("signature", None)
    return fields
