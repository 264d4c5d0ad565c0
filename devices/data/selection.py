"""Which of its images a device works with: those of its classes, and no more than it keeps, the newest or a fair sample of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from devices.data.pictures import SUFFIXES
from devices.data.spec import DataSpec, SourceData
from devices.data.split import hashed, position
from edge_fl.data import arrays
from edge_fl.errors import DataError

RESERVOIR = b"reservoir"
LEFT_OUT = "of a class that this device leaves out"


def select(found: SourceData, spec: DataSpec) -> SourceData:
    """What of a source this device works with: its classes, and no more images than it keeps. Raises DataError when none is left."""
    ids = [number for number, name in enumerate(found.classes) if not spec.only or name in spec.only]
    kept = found.samples.take(np.flatnonzero(np.isin(found.samples.y, ids)))
    skipped = Counter(found.skipped)
    if left := len(found.samples) - len(kept):
        skipped[LEFT_OUT] += left
    if spec.keep and len(kept) > spec.keep:
        skipped["beyond the images that this device keeps"] += len(kept) - spec.keep
        places = [position(image, RESERVOIR) for image in kept.x] if spec.policy == "reservoir" else None
        rows = (
            np.argsort(places, kind="stable")[: spec.keep] if places else np.arange(len(kept))[-spec.keep :]
        )
        kept = kept.take(np.sort(rows))
    if not len(kept):
        raise DataError(
            f"no image is left of {', '.join(spec.only)}; the source has {arrays.shortened(found.classes)}"
        )
    others = (
        part and part.take(np.flatnonzero(np.isin(part.y, ids))) for part in (found.validation, found.test)
    )
    validation, test = others
    return replace(found, samples=kept, validation=validation, test=test, skipped=skipped)


def select_files(files: Iterable[Path], spec: DataSpec) -> list[Path]:
    """The pictures worth reading, newest or fairest, in the order of the disk; what is no picture stays in, to be counted.

    Names are hashed for the fair sample: the `keep` smallest hashes are a reservoir that needs no memory of what came before.
    """
    every = list(files)
    pictures = [path for path in every if path.suffix.lower() in SUFFIXES]
    if not spec.keep or len(pictures) <= spec.keep:
        return every
    age: Callable[[Path], float] = (
        (lambda path: -path.stat().st_mtime_ns) if spec.policy == "newest" else _name_position
    )
    kept = set(sorted(pictures, key=age)[: spec.keep])
    return [path for path in every if path in kept or path.suffix.lower() not in SUFFIXES]


def _name_position(path: Path) -> float:
    return hashed(f"{path.parent.name}/{path.name}".encode(), RESERVOIR)
