"""The manifest of a release: part of the signed metadata, and stored with the installed files.

It also defines the canary's images, because server and device must generate the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from edge_fl import modalities
from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError, brief
from edge_fl.failures import Failure
from edge_fl.files.paths import composed
from edge_fl.heads.plan import HeadPlan
from edge_fl.inputs import InputSpec
from edge_fl.untrusted import NOT_JSON, converted, decoder

Precision = Literal["fp32", "int8"]
ExtraName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}\Z")]


class Canary(Struct, frozen=True, forbid_unknown_fields=True):
    """A fixed input and its expected features: images generated from `seed`, the first `features` of each row, within `tolerance`."""

    seed: Annotated[int, Meta(ge=0)]
    images: Annotated[int, Meta(ge=1, le=16)]
    features: list[list[float]]
    tolerance: Annotated[float, Meta(gt=0, le=1)] = 1e-3


class Variant(Struct, frozen=True, forbid_unknown_fields=True):
    """The extractor in another precision, with its own canary; `cosine` of features and `loss` of accuracy were measured by the server."""

    extractor: Blob
    canary: Canary
    cosine: float
    loss: float


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """One release: the extractor and the small extras that heads of its method use.

    `unit_norm`: features have length 1. `classes` names the class ids; a later release of the same extractor may append names. A head is
    valid for one `extractor.sha256`. `method` is "pretrained" if no run trained the extractor. `heads` says how the
    method fits heads from the extras, and limits the head updates that a device may send. `extractor` computes in `precision`; `variants`
    are the alternatives, of which an installed release has none (`chosen`). `sums`: subjects of the sums over devices that the release
    asks for.
    """

    release: Annotated[int, Meta(ge=1)]
    run_id: str
    method: str
    round: int
    extractor: Blob
    feature_dim: Annotated[int, Meta(ge=1, le=65536)]
    classes: list[str]
    input: InputSpec
    unit_norm: bool
    batch_norm: str
    opset: int
    ir: int
    canary: Canary
    min_onnxruntime: Annotated[str, Meta(pattern=r"^\d{1,4}(\.\d{1,4}){0,2}\Z")] = "1.17"
    extras: Annotated[dict[ExtraName, Blob], Meta(max_length=16)] = {}
    heads: HeadPlan = HeadPlan()
    precision: Precision = "fp32"
    variants: dict[Precision, Variant] = {}
    sums: Annotated[list[ExtraName], Meta(max_length=8)] = []

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "classes", [composed(name) for name in self.classes])

    def chosen(self, precision: Precision) -> Manifest:
        """The release reduced to one extractor: the variant in `precision`, or fp32 if there is none."""
        if variant := self.variants.get(precision):
            one = {"extractor": variant.extractor, "canary": variant.canary, "precision": precision}
            return msgspec.structs.replace(self, **one, variants={})
        return msgspec.structs.replace(self, variants={})

    @property
    def bytes(self) -> int:
        """What a device downloads that computes in fp32: the extractor and the extras."""
        return self.extractor.bytes + sum(extra.bytes for extra in self.extras.values())

    @property
    def extractors(self) -> frozenset[str]:
        """sha256 of every extractor for which heads of this release may be fitted."""
        return frozenset(
            {self.extractor.sha256, *(variant.extractor.sha256 for variant in self.variants.values())}
        )


class Entry(Struct, frozen=True):
    """A release in the signed metadata: the manifest as JSON text, and its position in the order of publication.

    Text, because the signed canonical JSON has no floating-point numbers.
    """

    manifest: str
    serial: int

    def read(self) -> Manifest:
        """Decode the manifest. Raises ArtefactError."""
        return decode(self.manifest)


def blobs(manifest: Manifest) -> list[Blob]:
    """The blobs of a release: extractor, variants, extras by name."""
    return list(paths(manifest).values())


def paths(manifest: Manifest) -> dict[str, Blob]:
    """The blobs by path in a TUF repository with consistent snapshots: RELEASE/SHA256.NAME."""
    named = {_extractor_name(manifest.precision): manifest.extractor}
    named |= {_extractor_name(name): manifest.variants[name].extractor for name in sorted(manifest.variants)}
    named |= {f"{name}.safetensors": manifest.extras[name] for name in sorted(manifest.extras)}
    return {f"{manifest.release}/{blob.sha256}.{name}": blob for name, blob in named.items()}


def target_path(release: int) -> str:
    """The TUF target name of a release: that of its fp32 extractor, whose `custom` field has the manifest."""
    return f"{release}/{_extractor_name('fp32')}"


def encode(manifest: Manifest) -> bytes:
    """Encode as JSON."""
    return msgspec.json.encode(manifest)


def decode(payload: bytes | str) -> Manifest:
    """Decode and validate a manifest. Raises ArtefactError."""
    try:
        manifest = decoder(Manifest).decode(payload)
    except NOT_JSON as error:
        raise ArtefactError(
            f"manifest: {error}", Failure.MANIFEST, consequence="release not installed"
        ) from error
    if flaw := _flaw(manifest):
        raise ArtefactError(
            f"manifest of release {manifest.release}: {flaw}",
            Failure.MANIFEST,
            consequence="release not installed",
        )
    return manifest


def listed(entries: Iterable[object]) -> list[Entry]:
    """Convert metadata entries to `Entry`, in the order of publication. Raises ArtefactError."""
    try:
        return sorted((converted(entry, Entry) for entry in entries), key=lambda entry: entry.serial)
    except msgspec.ValidationError as error:
        raise ArtefactError(
            f"signed metadata: {brief(error)}", Failure.MANIFEST, consequence="no release can be read"
        ) from error


def extends(classes: Sequence[str], earlier: Sequence[str]) -> bool:
    """Whether class ids of the `earlier` list mean the same in the new one: the same names, and possibly more after them."""
    return list(classes[: len(earlier)]) == list(earlier)


def canary_input(canary: Canary, input: InputSpec) -> NDArray[np.float32]:
    """Generate the canary's input [n, ...], on a grid of 256 levels.

    Uses PCG64's raw output, which NumPy keeps stable between versions, unlike its distributions.
    """
    shape = (canary.images, *input.shape)
    raw = np.random.PCG64(canary.seed).random_raw(-(-int(np.prod(shape)) // 8))
    levels = np.frombuffer(raw.astype("<u8").tobytes(), np.ubyte)
    return modalities.noise(levels[: int(np.prod(shape))].reshape(shape), input)


def _extractor_name(precision: Precision) -> str:
    return "extractor.onnx" if precision == "fp32" else f"extractor.{precision}.onnx"


def _flaw(manifest: Manifest) -> str | None:
    """The first inconsistency between valid fields, or None."""
    for canary in (manifest.canary, *(variant.canary for variant in manifest.variants.values())):
        rows = canary.features
        if len(rows) != canary.images:
            return f"canary has {len(rows)} rows of features, expected {canary.images}"
        if any(not 1 <= len(row) <= manifest.feature_dim for row in rows):
            return f"canary has a row that is empty or longer than feature_dim {manifest.feature_dim}"
    return None
