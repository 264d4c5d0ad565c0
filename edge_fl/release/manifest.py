"""The manifest: what a release is, in one struct. It travels inside signed metadata and stands beside the installed files."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from edge_fl.config import InputSpec
from edge_fl.errors import ArtefactError
from edge_fl.wire.blob import Blob


class Canary(Struct, frozen=True, forbid_unknown_fields=True):
    """A fixed input and the features it must give: images drawn from `seed`, first `features` of each row, within `tolerance`."""

    seed: int
    images: Annotated[int, Meta(ge=1, le=16)]
    features: list[list[float]]
    tolerance: float = 1e-3


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """One release: the extractor and, apart from it, the small extra parts that heads of this method use.

    `unit_norm` says that features have length 1; `classes` gives class ids their names; a head is valid for one `extractor.sha256`.
    """

    release: Annotated[int, Meta(ge=1)]
    task: str
    method: str
    round: int
    extractor: Blob
    feature_dim: Annotated[int, Meta(ge=1)]
    classes: list[str]
    input: InputSpec
    unit_norm: bool
    batch_norm: str
    opset: int
    ir: int
    canary: Canary
    min_onnxruntime: str = "1.17"
    extras: dict[str, Blob] = {}


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON."""
    return msgspec.json.encode(manifest)


def decode(payload: bytes) -> Manifest:
    """A manifest from JSON. Raises ArtefactError."""
    try:
        return msgspec.json.decode(payload, type=Manifest)
    except msgspec.DecodeError as error:
        raise ArtefactError(f"manifest: {error}; release not installed") from error
