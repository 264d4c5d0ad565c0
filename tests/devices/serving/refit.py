"""Another head in the place of the one that serves."""

from pathlib import Path
from typing import Any

import numpy as np

from edge_fl import heads
from edge_fl.heads.linear import direction
from edge_fl.heads.probability_calibration import UNCALIBRATED, Calibration
from edge_fl.heads.unknowns import KnownClasses
from edge_fl.modalities import scaled
from edge_fl_devices.storage.store import Store, StoredHead
from tests.devices import graphs
from tests.devices.images import X, Y


def refit(
    folder: Path, kind: str, y: np.ndarray = Y, calibration: Calibration = UNCALIBRATED, **plan: Any
) -> None:
    """Fits it on the images' features; `plan` and `extras` are those of a release."""
    (stored,) = Store(folder).heads()
    z = scaled(X).reshape(12, -1) @ graphs.WEIGHTS
    head = heads.fit(kind, z, y, 2, unit_norm=False, extractor=stored.head.extractor, **plan)
    Store(folder).keep_head(StoredHead(head, 1, stored.parcel, calibration=calibration))


def calibrated(temperature: float = 1.0, furthest: float = 1.0) -> Calibration:
    """Of 40 held-out predictions the upper half is correct; pictures at more than `furthest` from the class means are unknown."""
    confidences = np.linspace(0.5, 0.999, 40, dtype=np.float32)
    z = scaled(X).reshape(12, -1) @ graphs.WEIGHTS
    distances = np.linspace(0, furthest, 40, dtype=np.float32)
    return Calibration(temperature, confidences, np.arange(40) >= 20, known_of(z, Y), distances)


def known_of(z: np.ndarray, y: np.ndarray) -> KnownClasses:
    """What is known of the classes of features z [n, d] with class ids y [n]."""
    classes = np.unique(y)
    means = np.stack([direction(z[y == label]).mean(axis=0) for label in classes])
    return KnownClasses(classes, means, np.empty(0, np.float32))
