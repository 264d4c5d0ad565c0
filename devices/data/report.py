"""What was found in a device's data source, in numbers: no image and no file name of it is ever sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from devices.data.spec import SourceData
from edge_fl.data.samples import ClientData


@dataclass(frozen=True)
class DataReport:
    """What was found, in numbers: samples per class (all three sets), the sizes of the sets, and what was skipped and why."""

    source: str
    classes: tuple[str, ...]
    samples_per_class: tuple[int, ...]
    train: int
    validation: int
    test: int
    skipped: Mapping[str, int]
    examples: tuple[str, ...]
    fingerprint: str

    @property
    def samples(self) -> int:
        """Images in all three sets."""
        return self.train + self.validation + self.test

    @property
    def one_class(self) -> bool:
        """Whether only one class occurs; that is allowed, and makes a constant head."""
        return sum(count > 0 for count in self.samples_per_class) == 1

    @property
    def notes(self) -> list[str]:
        """What whoever looks after the device should know; no file names, because notes are sent."""
        notes = [f"{count} files skipped: {reason}" for reason, count in sorted(self.skipped.items())]
        return [*notes, "one_class"] if self.one_class else notes


def report(source: str, found: SourceData, data: ClientData) -> DataReport:
    """Of what `source` held, and of the three sets that were made of it."""
    counts = [part.counts(len(found.classes)) for part in (data.train, data.validation, data.test)]
    return DataReport(
        source,
        found.classes,
        tuple(np.sum(counts, axis=0).tolist()),
        len(data.train),
        len(data.validation),
        len(data.test),
        found.skipped,
        found.examples,
        data.fingerprint(),
    )
