"""Cache of computed features on disk: one file per extractor with a row per image.

The keys are the sha256 of the extractor and of the image's pixels: features never outlive a new release or a changed picture, and one new
picture does not cause the others to be extracted again.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_fl.files import atomic
from edge_fl.files.disk import reporting

KEY_BYTES = 32
Features = NDArray[np.float32]


@dataclass(frozen=True)
class KnownFeatures:
    """Features by the key of their image, and the time that the extractor takes for one image (0: not measured)."""

    rows: Mapping[bytes, Features] = field(default_factory=dict)
    latency_ms: float = 0.0


class FeatureCache:
    """Keeps the features of the `entries` most recently used extractors, in a folder readable only by its owner."""

    def __init__(self, folder: Path, entries: int = 3) -> None:
        self._folder, self._entries = folder, entries

    def read(self, extractor: str, dim: int) -> KnownFeatures:
        """Return what is known of an extractor, given by its sha256, and mark it as used; nothing if the file is missing or damaged."""
        path = self._path(extractor)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
                keys, z, latency_ms = content["keys"], content["z"], float(content["latency_ms"])
            os.utime(path)
        except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
            return KnownFeatures()
        if keys.shape != (len(z), KEY_BYTES) or keys.dtype != np.uint8 or z.shape != (len(keys), dim):
            return KnownFeatures()
        if z.dtype != np.float32 or not np.isfinite(z).all():
            return KnownFeatures()
        return KnownFeatures(dict(zip(map(bytes, keys), z, strict=True)), latency_ms)

    def write(self, extractor: str, known: KnownFeatures) -> None:
        """Replace what is stored of an extractor. Raises ArtefactError if it cannot be written."""
        keys = np.frombuffer(b"".join(known.rows), np.uint8).reshape(-1, KEY_BYTES)
        with reporting("feature cache"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic.writing(self._path(extractor)) as file:
                np.savez(file, keys=keys, z=np.stack([*known.rows.values()]), latency_ms=known.latency_ms)
            self._evict()

    def _path(self, extractor: str) -> Path:
        return self._folder / f"{extractor}.npz"

    def _evict(self) -> None:
        files = [path for path in self._folder.iterdir() if path.suffix in (".npz", ".npy")]
        oldest_first = sorted(files, key=lambda path: path.stat().st_mtime_ns)
        for path in oldest_first[: -self._entries]:
            path.unlink(missing_ok=True)


def key(image: NDArray[np.uint8]) -> bytes:
    """Return the sha256 of an image's shape and pixels."""
    header = f"{image.dtype}{image.shape}".encode()
    return hashlib.sha256(header + np.ascontiguousarray(image).tobytes()).digest()
