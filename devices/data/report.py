"""Summary of a device's data source in numbers; it contains no image and, in what is sent, no file name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from devices.data.spec import SourceData
from edge_fl.data.samples import ClientData


@dataclass(frozen=True)
class DataReport:
    """Samples per class over all three sets, sizes of the sets, and skipped files by reason with a few `examples`."""

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
        """Whether only one class occurs; this is allowed and gives a constant head."""
        return sum(count > 0 for count in self.samples_per_class) == 1

    @property
    def notes(self) -> list[str]:
        """Remarks for the fleet's operator; they are sent, so they contain no file names."""
        notes = [f"{count} files skipped: {reason}" for reason, count in sorted(self.skipped.items())]
        return [*notes, "one_class"] if self.one_class else notes


def report(source: str, content: SourceData, data: ClientData) -> DataReport:
    """Summarise the content of `source` and the three sets split from it."""
    counts = [part.counts(len(content.classes)) for part in (data.train, data.validation, data.test)]
    return DataReport(
        source,
        content.classes,
        tuple(np.sum(counts, axis=0).tolist()),
        train=len(data.train),
        validation=len(data.validation),
        test=len(data.test),
        skipped=content.skipped,
        examples=content.examples,
        fingerprint=data.fingerprint(),
    )
