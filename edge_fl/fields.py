"""Types of the fields that several messages have, and the signatures on messages."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

Id = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}\Z")]
NAME = "[a-z0-9][a-z0-9-]{0,31}"  # no command takes it for an option
EXPECTED_NAME = "expected 1 to 32 of a-z, 0-9 and '-', not beginning with '-'"
Name = Annotated[str, Meta(pattern=rf"^{NAME}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**40)]
MAX_SAMPLES = 10_000_000
"""Most samples that one device may state: more pictures than the disk of any board holds, so that no count hides those of the others."""
Samples = Annotated[int, Meta(ge=0, le=MAX_SAMPLES)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Text = Annotated[str, Meta(max_length=2000)]
ShortText = Annotated[str, Meta(max_length=200)]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{2,1024}\Z")]
Version = Annotated[str, Meta(max_length=32)]


class Tier(StrEnum):
    """Device tier: fit a head on a frozen extractor, or train parts of the model."""

    HEAD = "head"
    FULL = "full"


class ServerSignature(Struct, frozen=True):
    """Signature of the server on a message to one device, by the online key that the signed metadata name (role timestamp).

    `number` grows with every signature, `expires` is a Unix time (0: never), `signatures` are in hex by key id. What is signed:
    `edge_fl.secure.signatures`.
    """

    fleet: Name
    device: Name
    number: Number
    expires: Count = 0
    signatures: Annotated[dict[Annotated[str, Meta(max_length=64)], Hex], Meta(max_length=8)] = {}


class DeviceSignature(Struct, frozen=True):
    """Signature of a device on its own message, with the key of its certificate (DER). `number` grows with every signature."""

    certificate: Annotated[bytes, Meta(max_length=4096)]
    number: Number
    signature: Annotated[bytes, Meta(max_length=128)] = b""
