"""The manifest: what a release is, in one struct. It travels inside signed metadata and stands beside the installed files.

The canary's images are drawn here too, because the server that writes a manifest and the device that obeys it must draw the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from edge_fl.config import InputSpec
from edge_fl.errors import ArtefactError, brief
from edge_fl.heads.plan import HeadPlan
from edge_fl.wire.blob import Blob

Precision = Literal["fp32", "int8"]
ExtraName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}\Z")]


class Canary(Struct, frozen=True, forbid_unknown_fields=True):
    """A fixed input and the features it must give: images drawn from `seed`, first `features` of each row, within `tolerance`."""

    seed: Annotated[int, Meta(ge=0)]
    images: Annotated[int, Meta(ge=1, le=16)]
    features: list[list[float]]
    tolerance: Annotated[float, Meta(gt=0, le=1)] = 1e-3


class Variant(Struct, frozen=True, forbid_unknown_fields=True):
    """The same extractor in other numbers, with its own canary; `cosine` of its features and `loss` of accuracy as the server measured."""

    extractor: Blob
    canary: Canary
    cosine: float
    loss: float


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """One release: the extractor and, apart from it, the small extra parts that heads of this method use.

    `unit_norm` says that features have length 1; `classes` gives class ids their names; a head is valid for one `extractor.sha256`.
    `heads` says how the method finds heads from the extras, and the only parts that a device may send back. `extractor` computes in
    `precision`; `variants` are the others to choose from, of which an installed release has none (`chosen`).
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

    def chosen(self, precision: Precision) -> Manifest:
        """The release with the one extractor that a device chose, the fp32 one where there is no such variant."""
        if variant := self.variants.get(precision):
            one = {"extractor": variant.extractor, "canary": variant.canary, "precision": precision}
            return msgspec.structs.replace(self, **one, variants={})
        return msgspec.structs.replace(self, variants={})

    @property
    def extractors(self) -> frozenset[str]:
        """The sha256 of every extractor that heads of this release may be for."""
        return frozenset(
            {self.extractor.sha256, *(variant.extractor.sha256 for variant in self.variants.values())}
        )


class Entry(Struct, frozen=True):
    """A release as signed metadata lists it: the manifest as JSON text, and its place in the order of publication.

    Text, because the canonical JSON that is signed has no floating point numbers.
    """

    manifest: str
    serial: int

    def read(self) -> Manifest:
        """The manifest. Raises ArtefactError."""
        return decode(self.manifest)


def blobs(manifest: Manifest) -> list[Blob]:
    """What belongs to a release: the extractor first, then its variants, then the extras by name."""
    return list(paths(manifest).values())


def paths(manifest: Manifest) -> dict[str, Blob]:
    """The same by their paths in a TUF repository (with consistent snapshots): RELEASE/SHA256.NAME."""
    named = {_extractor_name(manifest.precision): manifest.extractor}
    named |= {_extractor_name(name): manifest.variants[name].extractor for name in sorted(manifest.variants)}
    named |= {f"{name}.safetensors": manifest.extras[name] for name in sorted(manifest.extras)}
    return {f"{manifest.release}/{blob.sha256}.{name}": blob for name, blob in named.items()}


def target_path(release: int) -> str:
    """The one name of a release among TUF's targets: that of its fp32 extractor, whose `custom` carries the manifest."""
    return f"{release}/{_extractor_name('fp32')}"


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON."""
    return msgspec.json.encode(manifest)


def decode(payload: bytes | str) -> Manifest:
    """A manifest from JSON, its numbers consistent with one another. Raises ArtefactError."""
    try:
        manifest = msgspec.json.decode(payload, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtefactError(f"manifest: {error}", "manifest", consequence="release not installed") from error
    if flaw := _flaw(manifest):
        raise ArtefactError(
            f"manifest of release {manifest.release}: {flaw}", "manifest", consequence="release not installed"
        )
    return manifest


def listed(entries: Iterable[object]) -> list[Entry]:
    """Entries as plain dicts, as metadata carries them, in the order of publication. Raises ArtefactError."""
    try:
        return sorted((msgspec.convert(entry, Entry) for entry in entries), key=lambda entry: entry.serial)
    except msgspec.ValidationError as error:
        raise ArtefactError(
            f"signed metadata: {brief(error)}", "manifest", consequence="no release can be read from it"
        ) from error


def scale(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pixels [N, C, H, W] from 0..255 to 0..1, the range that every extractor takes."""
    return images.astype(np.float32) / np.float32(255)


def canary_images(canary: Canary, input: InputSpec) -> NDArray[np.float32]:
    """The canary's input [n, C, H, W] in 0..1, on the grid of real pixels.

    From PCG64's raw output, which NumPy keeps the same from version to version (it promises that for no distribution).
    """
    shape = (canary.images, *input.shape)
    raw = np.random.PCG64(canary.seed).random_raw(-(-int(np.prod(shape)) // 8))
    pixels = np.frombuffer(raw.astype("<u8").tobytes(), np.uint8)
    return scale(pixels[: int(np.prod(shape))].reshape(shape))


def _extractor_name(precision: Precision) -> str:
    return "extractor.onnx" if precision == "fp32" else f"extractor.{precision}.onnx"


def _flaw(manifest: Manifest) -> str | None:
    """What contradicts itself in a manifest whose fields are each allowed."""
    for canary in (manifest.canary, *(variant.canary for variant in manifest.variants.values())):
        rows = canary.features
        if len(rows) != canary.images:
            return f"canary has {len(rows)} rows of features, expected {canary.images}"
        if any(not 1 <= len(row) <= manifest.feature_dim for row in rows):
            return f"canary has a row that is empty or longer than feature_dim {manifest.feature_dim}"
    return None
