"""Select the images a device uses: those of its classes, and at most a given number, the newest or a fair sample."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from edge_fl.data import arrays
from edge_fl.data.pictures import SUFFIXES
from edge_fl.data.samples import Indices, Samples
from edge_fl.errors import DataError
from edge_fl.files.paths import raw
from edge_fl_devices.data.spec import DataSpec
from edge_fl_devices.data.split import hashed, position

RESERVOIR = b"reservoir"
LEFT_OUT = "of a class that this device leaves out"


def of_classes(samples: Samples, classes: Sequence[str], spec: DataSpec) -> Indices:
    """Return the rows of the samples of the classes `spec.only`."""
    ids = [number for number, name in enumerate(classes) if name in spec.only]
    return np.flatnonzero(np.isin(samples.y, ids)) if spec.only else np.arange(len(samples))


def select(samples: Samples, classes: Sequence[str], spec: DataSpec, skipped: Counter[str]) -> Indices:
    """Return the rows of the samples of the classes `spec.only`, at most `spec.keep`; count the others.

    Raises DataError when none is left.
    """
    kept = of_classes(samples, classes, spec)
    if left_out := len(samples) - len(kept):
        skipped[LEFT_OUT] += left_out
    if spec.keep and len(kept) > spec.keep:
        skipped["beyond the images that this device keeps"] += len(kept) - spec.keep
        if spec.policy == "reservoir":
            places = [position(samples.x[row], RESERVOIR) for row in kept]
            kept = np.sort(kept[np.argsort(places, kind="stable")[: spec.keep]])
        else:
            kept = kept[-spec.keep :]
    if not len(kept):
        raise DataError(
            f"no image is left of {', '.join(spec.only)}; the source has {arrays.shortened(classes)}"
        )
    return kept


def select_files(files: Iterable[Path], spec: DataSpec) -> list[Path]:
    """Return the pictures to read, at most `spec.keep`, in the given order; other files stay in the list, to be counted as skipped.

    The fair sample takes the `keep` smallest hashes of the names: a reservoir that needs no state between calls.
    """
    every = list(files)
    pictures = [path for path in every if path.suffix.lower() in SUFFIXES]
    if not spec.keep or len(pictures) <= spec.keep:
        return every
    order: Callable[[Path], float] = _newest_first if spec.policy == "newest" else _name_position
    kept = set(sorted(pictures, key=order)[: spec.keep])
    return [path for path in every if path in kept or path.suffix.lower() not in SUFFIXES]


def _newest_first(path: Path) -> float:
    try:
        return -path.stat().st_mtime_ns
    except OSError:  # deleted since it was listed
        return 0


def _name_position(path: Path) -> float:
    return hashed(raw(path.parent.name) + b"/" + raw(path.name), RESERVOIR)
