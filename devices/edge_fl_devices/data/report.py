"""Summary of a device's data source in numbers; it contains no image and, in what is sent, no file name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_fl.files import paths

if TYPE_CHECKING:  # the agent itself decodes no pictures
    from edge_fl.data.pictures import PictureError

MOST_NAMED = 3
"""Files that are named per reason."""


class Skipped(Counter[str]):
    """Counts of unused files by reason; `names` are the first few of each, with details, for this machine only."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, list[str]] = defaultdict(list)

    def add(self, path: Path, why: str | PictureError, root: Path | None = None) -> None:
        """Count a file, which is named relative to `root`."""
        reason, detail = (why, "") if isinstance(why, str) else (why.reason, why.detail)
        self[reason] += 1
        if len(self.names[reason]) < MOST_NAMED:
            name = paths.text(path.relative_to(root) if root and path.is_relative_to(root) else path)
            self.names[reason].append(f"{name} ({detail})" if detail else name)


def named(reason: str, count: int, names: Sequence[str]) -> str:
    """Format a reason with its files: "5 truncated: cat/1.jpg, cat/2.jpg, dog/1.jpg and 2 more"."""
    if not names:
        return f"{count} {reason}"
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return f"{count} {reason}: {', '.join(names)}{more}"


@dataclass(frozen=True)
class DataReport:
    """Samples per class over all three sets, and skipped files by reason.

    `hints` suggest classes for misspelt folders; `disappeared` are classes that had images at the previous count; `names` are the first
    skipped files of each reason.
    """

    classes: tuple[str, ...]
    samples_per_class: tuple[int, ...]
    skipped: Mapping[str, int]
    hints: tuple[str, ...] = ()
    disappeared: tuple[str, ...] = ()
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

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
        """Remarks for this device only, because they contain names of files and folders."""
        return [
            *(
                f"skipped: {named(reason, self.skipped[reason], self.names[reason])}"
                for reason in sorted(self.names)
                if self.names[reason]
            ),
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
