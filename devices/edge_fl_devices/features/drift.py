"""Drift score: distance between the features seen at prediction and those that the head was fitted on.

    FOLDER/drift/fitted.json    moments of the features of the last fit
    FOLDER/drift/seen.json      moments of the features predicted since, with slow forgetting

The score is the root mean square, over the features, of the shift of the mean in standard deviations of the fit. Variances are shrunk
towards their mean over the features, because few samples say little about a feature that rarely responds. Samples of the same distribution
score about sqrt(1/n + 1/m) for n fitted and m seen ones; a score above THRESHOLD over at least MIN_SEEN samples is drift, unless the fit
had fewer than MIN_FITTED, of which a few always look different from the rest.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_fl.files.shared import make_folder
from edge_fl_devices.storage import read_json, write_json

FITTED, SEEN = "fitted.json", "seen.json"
THRESHOLD = 0.5
MIN_SEEN, MIN_FITTED = 30, 10
PRIOR_SAMPLES = 30
"""Number of samples with the mean variance that are added to those of the fit."""

MAX_WEIGHT = 500
"""Cap on the weight of earlier samples, so that old ones are forgotten."""


class Moments(Struct, frozen=True):
    """Count, mean [d] and variance [d] of the features of one extractor."""

    extractor: str
    count: float
    mean: list[float]
    variance: list[float]


def moments(extractor: str, z: NDArray[np.float32]) -> Moments:
    """Compute the moments of features z [n, d]."""
    mean, variance = z.mean(axis=0, dtype=np.float64), z.var(axis=0, dtype=np.float64)
    return Moments(extractor, len(z), mean.tolist(), variance.tolist())


def joined(old: Moments | None, new: Moments) -> Moments:
    """Combine both; `old` is dropped when it belongs to another extractor."""
    if old is None or old.extractor != new.extractor or len(old.mean) != len(new.mean):
        return new
    weight = min(old.count, MAX_WEIGHT)
    share = new.count / (weight + new.count)
    before, now = np.asarray(old.mean), np.asarray(new.mean)
    mean = before + share * (now - before)
    spread = (1 - share) * np.asarray(old.variance) + share * np.asarray(new.variance)
    variance = spread + share * (1 - share) * np.square(now - before)
    return Moments(new.extractor, weight + new.count, mean.tolist(), variance.tolist())


def score(fitted: Moments, seen: Moments) -> float:
    """Return the drift score; 0 when the two are not comparable, or of fewer than MIN_SEEN or MIN_FITTED samples."""
    if fitted.count < MIN_FITTED:
        return 0.0
    if fitted.extractor != seen.extractor or seen.count < MIN_SEEN or len(fitted.mean) != len(seen.mean):
        return 0.0
    variance = np.asarray(fitted.variance)
    shrunk = (fitted.count * variance + PRIOR_SAMPLES * variance.mean()) / (fitted.count + PRIOR_SAMPLES)
    if not shrunk.any():
        return 0.0
    shift = (np.asarray(seen.mean) - np.asarray(fitted.mean)) / np.sqrt(shrunk)
    return float(np.sqrt(np.mean(np.square(shift))))


def remember_fit(folder: Path, fitted: Moments) -> None:
    """Store the moments of a fit; a new fit resets what was seen."""
    if read_json(folder / "drift" / FITTED, Moments) == fitted:
        return
    _write(folder / "drift" / FITTED, fitted)
    with suppress(OSError):
        (folder / "drift" / SEEN).unlink(missing_ok=True)


def remember_seen(folder: Path, seen: Moments) -> None:
    """Add the moments of predicted samples; a power cut may lose them, and an unwritable folder is ignored."""
    _write(folder / "drift" / SEEN, joined(read_json(folder / "drift" / SEEN, Moments), seen), flush=False)


def measured(folder: Path) -> float:
    """Return the current score, or 0 when it is below THRESHOLD."""
    fitted, seen = (read_json(folder / "drift" / name, Moments) for name in (FITTED, SEEN))
    value = score(fitted, seen) if fitted and seen else 0.0
    return value if value >= THRESHOLD else 0.0


def _write(path: Path, content: Moments, *, flush: bool = True) -> None:
    with suppress(OSError):
        make_folder(path.parent, 0o700)
        write_json(path, content, flush=flush)
