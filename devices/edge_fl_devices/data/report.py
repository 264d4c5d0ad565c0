"""Summary of a device's data source in numbers; it contains no image and, in what is sent, no file name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DataReport:
    """Samples per class over all three sets, and skipped files by reason.

    `hints` suggest classes for misspelt folders; `disappeared` are classes that had images at the previous count.
    """

    classes: tuple[str, ...]
    samples_per_class: tuple[int, ...]
    skipped: Mapping[str, int]
    hints: tuple[str, ...] = ()
    disappeared: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Images in all three sets."""
        return sum(self.samples_per_class)

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
