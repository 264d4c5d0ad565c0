"""Cache of computed features on disk.

The key is the extractor's sha256 and the images' fingerprint, so features never outlive a new release or changed data.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.wire.blob import digest
from edge_fl_devices.features.extractor import Extractor, Features, Images


class FeatureCache:
    """Keeps the `entries` most recently used feature arrays, in a folder readable only by its owner."""

    def __init__(self, folder: Path, entries: int = 8) -> None:
        self._folder, self._entries = folder, entries

    def features(self, extractor: Extractor, x: Images) -> Features:
        """Return the features [N, d] of images `x`, from the cache or computed and then cached."""
        path = self._folder / f"{digest(f'{extractor.sha256} {fingerprint(x)}'.encode())}.npy"
        if (cached := _load(path, len(x))) is not None:
            return cached
        features = extractor.features(x)
        with reporting("feature cache"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic.writing(path) as file:
                np.save(file, features, allow_pickle=False)
            self._evict()
        return features

    def _evict(self) -> None:
        oldest_first = sorted(self._folder.glob("*.npy"), key=lambda path: path.stat().st_mtime_ns)
        for path in oldest_first[: -self._entries]:
            path.unlink(missing_ok=True)


def fingerprint(x: Images) -> str:
    """Return the sha256 of the images' shape and pixels."""
    header = f"{x.dtype}{x.shape}".encode()
    return digest(digest(header).encode() + digest(np.ascontiguousarray(x).data.cast("B")).encode())


def _load(path: Path, count: int) -> Features | None:
    """Return cached features and mark them as used; None when the file is missing or unreadable."""
    try:
        features: Features = np.load(path, allow_pickle=False)
        os.utime(path)
    except (OSError, ValueError, EOFError):
        return None
    return features if features.ndim == 2 and len(features) == count else None
