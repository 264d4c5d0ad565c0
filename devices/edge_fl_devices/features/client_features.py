"""Features of a device's train, validation and test samples, with their labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_fl.data.grouping import Groups, Importance, alone, count
from edge_fl_devices.storage.slots import InstalledRelease


@dataclass(frozen=True, eq=False)
class FeatureSet:
    """Features z float32 [n, d] of one set, with class ids y int64 [n], groups int64 [n] (empty: all alone) and importance float64 [n]."""

    z: NDArray[np.float32]
    y: NDArray[np.int64]
    groups: Groups = field(default_factory=alone)
    importance: Importance = field(default_factory=lambda: np.empty(0))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def scenes(self) -> int:
        """Number of groups."""
        return count(self.groups, len(self))


@dataclass(frozen=True, eq=False)
class ClientFeatures:
    """Features of the three sets from one extractor; `latency_ms` is the time for one sample (0: not measured)."""

    train: FeatureSet
    validation: FeatureSet
    test: FeatureSet
    latency_ms: float = 0.0

    def __len__(self) -> int:
        return len(self.train) + len(self.validation) + len(self.test)

    @property
    def scenes(self) -> int:
        """Number of groups in the three sets."""
        return count(np.concatenate([self.train.groups, self.validation.groups, self.test.groups]), len(self))

    @property
    def pool(self) -> FeatureSet:
        """All three sets, in this order."""
        sets = (self.train, self.validation, self.test)
        return FeatureSet(
            np.concatenate([each.z for each in sets if len(each)] or [self.train.z]),
            np.concatenate([each.y for each in sets]),
            np.concatenate([each.groups for each in sets]),
            np.concatenate([each.importance for each in sets]),
        )


def no_labels(dim: int) -> ClientFeatures:
    """The features of a device without labelled samples."""
    none = FeatureSet(np.empty((0, dim), np.float32), np.empty(0, np.int64))
    return ClientFeatures(none, none, none)


@dataclass(frozen=True, eq=False)
class LoadedFeatures:
    """Features per requested release, divided alike (None where the samples do not fit its input), and the data's fingerprint.

    `stamp` is that of the files they were read from ("": unknown).
    `bits` is how many the 16-bit pictures use, 0 if there are none.
    """

    by_extractor: tuple[ClientFeatures | None, ...]
    fingerprint: str
    stamp: str = ""
    bits: int = 0


FeatureLoader = Callable[[Sequence[InstalledRelease]], LoadedFeatures]
"""Computes the features of the device's data with the extractors of these releases.

Raises DataError when the data do not fit the first release, ArtefactError when an extractor fails.
"""
