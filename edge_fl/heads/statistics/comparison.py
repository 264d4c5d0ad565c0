"""Compares class means with each other: of one device with those of the others, or of a prior with a device's own.

Class means are centred by their device (`class_statistics`), so that those of the same class point in the same direction whatever the
device's style, and those of different classes away from each other: on average their cosine is below 0. A mean is far from others if its
cosine to them is below 0; how often that happens to honest devices, and what it stops, is in docs/class-statistics.md.
"""

from collections.abc import Sequence

import numpy as np

from edge_fl.heads.statistics.class_statistics import Doubles, Labels, Statistics

LEAST_DEVICES = 4
"""Devices with pictures of a class, for comparing its means; of three, two that lie would be the majority."""
SHORTEST = 1e-9


def far_classes(devices: Sequence[Statistics]) -> list[Labels]:
    """The classes of each device whose mean is far from those of the others, by the median of its cosines to them.

    A minority that lies together, also with the same vector, cannot move a median. A device with more than half of its classes far away is
    far in all of them. Classes of fewer than LEAST_DEVICES are not compared.
    """
    known = np.stack([found.counts for found in devices]) >= 0.5
    far = np.zeros(known.shape, bool)
    for label in np.flatnonzero(known.sum(axis=0) >= LEAST_DEVICES):
        have = np.flatnonzero(known[:, label])
        directions = unit(np.stack([devices[place].sums[label] for place in have.tolist()]))
        cosines = directions @ directions.T
        np.fill_diagonal(cosines, np.nan)
        far[have, label] = np.nanmedian(cosines, axis=1) < 0
    most = far.sum(axis=1) > known.sum(axis=1) / 2
    return [np.flatnonzero(row) for row in far | (most[:, None] & known)]


def unit(rows: Doubles) -> Doubles:
    """Rows [n, d] scaled to length 1."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), SHORTEST))
