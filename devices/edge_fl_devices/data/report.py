"""Summary of a device's data source in numbers; it contains no image and, in what is sent, no file name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge_fl.data.samples import ClientData
from edge_fl.errors import DataError
from edge_fl_devices.data.spec import SourceCount, SourceData


@dataclass(frozen=True)
class DataReport:
    """Samples per class over all three sets, sizes of the sets, and skipped files by reason with a few `examples`.

    `hints` suggest classes for misspelt folders; `disappeared` are classes that had images at the previous count. Images that are only
    counted are all in `train`, and have no fingerprint.
    """

    source: str
    classes: tuple[str, ...]
    samples_per_class: tuple[int, ...]
    train: int
    validation: int
    test: int
    skipped: Mapping[str, int]
    examples: tuple[str, ...]
    fingerprint: str = ""
    hints: tuple[str, ...] = ()
    disappeared: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Images in all three sets."""
        return self.train + self.validation + self.test

    @property
    def one_class(self) -> bool:
        """Whether only one class occurs; this is allowed and gives a constant head."""
        return sum(count > 0 for count in self.samples_per_class) == 1

    @property
    def local_notes(self) -> list[str]:
        """Remarks for this device only, because they contain names of folders."""
        return [
            *self.hints,
            *(f"class {name!r} had images before and has none now" for name in self.disappeared),
        ]

    @property
    def notes(self) -> list[str]:
        """Remarks for the fleet's operator; they are sent, so they contain no file names."""
        notes = [f"{count} files skipped: {reason}" for reason, count in sorted(self.skipped.items())]
        if self.disappeared:
            notes.append(f"{len(self.disappeared)} classes had images before and have none now")
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
        hints=content.hints,
    )


def count_report(source: str, count: SourceCount) -> DataReport:
    """Summarise images that were counted, not read. Raises DataError for fewer than a split needs."""
    total = sum(count.samples_per_class)
    if total < 2:
        raise DataError(f"{total} usable image, expected 2 or more (one to train, one to test)")
    return DataReport(
        source,
        count.classes,
        count.samples_per_class,
        train=total,
        validation=0,
        test=0,
        skipped=count.skipped,
        examples=count.examples,
        hints=count.hints,
    )
