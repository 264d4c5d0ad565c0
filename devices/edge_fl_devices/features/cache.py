"""Cache of computed features on disk: FOLDER/SHA256.rows, one file per extractor with a row per image.

The keys are the sha256 of the extractor and of the image's pixels: features never outlive a new release or a changed picture, and one new
picture does not cause the others to be extracted again. Rows are appended in steps, each with a checksum, so an extraction that is killed
keeps what it has computed. `edge_fl_devices.data.picture_index` knows the keys of unchanged files.
"""

import math
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.shared import make_folder

KEY_BYTES = 32
MAGIC = b"edge-fl features 1\n"
HEADER = struct.Struct(f"<{len(MAGIC)}sId")  # MAGIC, number of features, milliseconds for one image
SUFFIX = ".rows"
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
        """Return what is known of an extractor, given by its sha256, and mark it as used; damaged rows are left out."""
        path = self._path(extractor)
        try:
            content = path.read_bytes()
            os.utime(path)
            magic, stored_dim, latency_ms = HEADER.unpack_from(content)
        except (OSError, struct.error):
            return KnownFeatures()
        if magic != MAGIC or stored_dim != dim:
            return KnownFeatures()
        latency_ms = latency_ms if math.isfinite(latency_ms) and latency_ms > 0 else 0.0
        whole = (len(content) - HEADER.size) // _row(dim).itemsize  # a power cut may leave part of a row
        stored = np.frombuffer(content, _row(dim), whole, HEADER.size)
        rows = {
            row["key"].tobytes(): row["z"]
            for row in stored
            if _checksum(row) == row["crc"] and np.isfinite(row["z"]).all()
        }
        return KnownFeatures(rows, latency_ms)

    def append(self, extractor: str, known: KnownFeatures) -> None:
        """Add features to what is stored of an extractor. Raises ArtefactError if they cannot be written."""
        path, payload = self._path(extractor), _encoded(known)
        with reporting("feature cache"):
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                self.write(extractor, known)
                return
            step = _row(_dim(known)).itemsize
            end = HEADER.size + max(0, size - HEADER.size) // step * step
            with path.open("r+b") as file:
                if file.read(HEADER.size)[: HEADER.size - 8] != payload[: HEADER.size - 8]:
                    end = 0  # damaged, or of another version
                file.truncate(end)
                file.seek(0)
                file.write(payload[: HEADER.size])  # the time for one image, as measured last
                file.seek(max(end, HEADER.size))
                file.write(payload[HEADER.size :])
                file.flush()
                os.fsync(file.fileno())

    def write(self, extractor: str, known: KnownFeatures) -> None:
        """Replace what is stored of an extractor. Raises ArtefactError if it cannot be written."""
        with reporting("feature cache"):
            make_folder(self._folder, 0o700)
            atomic.write(self._path(extractor), _encoded(known), private=True)
            self._evict()

    def _path(self, extractor: str) -> Path:
        return self._folder / f"{extractor}{SUFFIX}"

    def _evict(self) -> None:
        files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: -self._entries]:
            path.unlink(missing_ok=True)


def _row(dim: int) -> np.dtype[np.void]:
    return np.dtype([("key", f"V{KEY_BYTES}"), ("z", "<f4", (dim,)), ("crc", "<u4")])


def _dim(known: KnownFeatures) -> int:
    return len(next(iter(known.rows.values()), ()))


def _checksum(row: np.void) -> int:
    return zlib.crc32(row["key"].tobytes() + row["z"].tobytes())


def _encoded(known: KnownFeatures) -> bytes:
    """Header and rows."""
    dim = _dim(known)
    rows = np.zeros(len(known.rows), _row(dim))
    for row, (image, z) in zip(rows, known.rows.items(), strict=True):
        row["key"], row["z"] = np.void(image), z
        row["crc"] = _checksum(row)
    return HEADER.pack(MAGIC, dim, known.latency_ms) + rows.tobytes()
