"""Features on disk, so that they are computed once.

A cached feature belongs to one extractor (by its sha256) and one set of images (by their fingerprint): a new release or new data
never meets old features.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from devices.features.extractor import Extractor, Features, Images
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.wire.blob import digest


class FeatureCache:
    """Features on disk, the `entries` used last. They are personal: they stay in a folder that only their owner reads."""

    def __init__(self, folder: Path, entries: int = 8) -> None:
        self._folder, self._entries = folder, entries

    def features(self, extractor: Extractor, x: Images) -> Features:
        """The extractor's features [N, d] of images `x`, computed at most once while they stay in the cache."""
        path = self._folder / f"{digest(f'{extractor.sha256} {fingerprint(x)}'.encode())}.npy"
        if (known := _load(path, len(x))) is not None:
            return known
        found = extractor.features(x)
        with reporting("feature cache"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic.writing(path) as file:
                np.save(file, found, allow_pickle=False)
            self._forget_oldest()
        return found

    def _forget_oldest(self) -> None:
        oldest_first = sorted(self._folder.glob("*.npy"), key=lambda path: path.stat().st_mtime_ns)
        for path in oldest_first[: -self._entries]:
            path.unlink(missing_ok=True)


def fingerprint(x: Images) -> str:
    """sha256 of the images' shape and pixels."""
    header = f"{x.dtype}{x.shape}".encode()
    return digest(digest(header).encode() + digest(np.ascontiguousarray(x).data.cast("B")).encode())


def _load(path: Path, count: int) -> Features | None:
    """Cached features, used just now; None when they are not there or not readable."""
    try:
        found: Features = np.load(path, allow_pickle=False)
        os.utime(path)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.ndim == 2 and len(found) == count else None
