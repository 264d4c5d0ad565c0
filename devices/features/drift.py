"""Drift: the features of what a device sees now, against those that its head was fitted on, by their means.

    FOLDER/drift/fitted.json    moments of the features of the last fit
    FOLDER/drift/seen.json      moments of what was predicted since, forgotten slowly

The score is the root mean square, over the features, of how far the mean has moved, in standard deviations of the fit. Images of the same
kind score about sqrt(1/n); a score above THRESHOLD with enough images seen is drift. It says that something changed, not what.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_fl.files import atomic

FITTED, SEEN = "fitted.json", "seen.json"
THRESHOLD = 0.5
MIN_SEEN = 30
REMEMBERED = 500
"""After so many images the older ones weigh less."""


class Moments(Struct, frozen=True):
    """Count, mean [d] and variance [d] of the features of one extractor."""

    extractor: str
    count: float
    mean: list[float]
    variance: list[float]


def moments(extractor: str, z: NDArray[np.float32]) -> Moments:
    """Those of features z [n, d]."""
    mean, variance = z.mean(axis=0, dtype=np.float64), z.var(axis=0, dtype=np.float64)
    return Moments(extractor, len(z), mean.tolist(), variance.tolist())


def joined(old: Moments | None, new: Moments) -> Moments:
    """Both together; `old` of another extractor, or of none, is forgotten."""
    if old is None or old.extractor != new.extractor or len(old.mean) != len(new.mean):
        return new
    weight = min(old.count, REMEMBERED)
    share = new.count / (weight + new.count)
    before, now = np.asarray(old.mean), np.asarray(new.mean)
    mean = before + share * (now - before)
    spread = (1 - share) * np.asarray(old.variance) + share * np.asarray(new.variance)
    variance = spread + share * (1 - share) * np.square(now - before)
    return Moments(new.extractor, weight + new.count, mean.tolist(), variance.tolist())


def score(fitted: Moments, seen: Moments) -> float:
    """How far the features moved; 0 when the two cannot be compared, or too little was seen."""
    if fitted.extractor != seen.extractor or seen.count < MIN_SEEN or len(fitted.mean) != len(seen.mean):
        return 0.0
    scale = np.sqrt(fitted.variance)
    alive = scale > 1e-6 * max(1.0, float(scale.max(initial=0.0)))
    if not alive.any():
        return 0.0
    moved = (np.asarray(seen.mean) - np.asarray(fitted.mean))[alive] / scale[alive]
    return float(np.sqrt(np.mean(np.square(moved))))


def remember_fit(folder: Path, found: Moments) -> None:
    """A head was fitted on these: what was seen before it no longer counts, unless it is the same fit again."""
    if _read(folder / "drift" / FITTED) == found:
        return
    _write(folder / "drift" / FITTED, found)
    with suppress(OSError):
        (folder / "drift" / SEEN).unlink(missing_ok=True)


def remember_seen(folder: Path, found: Moments) -> None:
    """More was seen; a power cut may forget it. Nothing happens where the folder cannot be written."""
    _write(folder / "drift" / SEEN, joined(_read(folder / "drift" / SEEN), found), flush=False)


def measured(folder: Path) -> float:
    """The score now, or 0 below THRESHOLD."""
    fitted, seen = (_read(folder / "drift" / name) for name in (FITTED, SEEN))
    found = score(fitted, seen) if fitted and seen else 0.0
    return found if found >= THRESHOLD else 0.0


def _read(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Moments)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, found: Moments, *, flush: bool = True) -> None:
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.write(path, msgspec.json.encode(found), flush=flush)
