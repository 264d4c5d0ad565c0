"""Summary of a device's data in numbers, and the last one in FOLDER/data.json: for `device status`, and to notice a class that disappeared.

It contains no sample and, in what is sent, no file name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.data import grouping
from edge_fl.data.class_names import SKIPPED
from edge_fl.errors import DeadlineError, KilledError
from edge_fl.failures import Failure
from edge_fl.files import paths
from edge_fl.inputs import Kind
from edge_fl.modalities import ABOUT, About
from edge_fl.modalities.limits import UNKNOWN_DEPTH, Depth
from edge_fl_devices.storage import read_json, write_json

MOST_NAMED = 3
"""Files that are named per reason."""
MOST_REMARKS = 8
"""Different remarks that are told, the most frequent ones."""
FILE = "data.json"


class Skipped(Counter[str]):
    """Counts of files by reason why they are unused, or by remark; `names` are the first few of each, with details, for this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, list[str]] = defaultdict(list)

    def add(self, path: Path, reason: str, detail: str = "", *, root: Path) -> None:
        """Count a file, which is named relative to `root`."""
        self[reason] += 1
        if len(self.names[reason]) < MOST_NAMED:
            name = paths.text(path.relative_to(root) if path.is_relative_to(root) else path)
            self.names[reason].append(f"{name} ({detail})" if detail else name)


def named(reason: str, count: int, names: Sequence[str]) -> str:
    """Format a reason with its files: "5 truncated: cat/1.jpg, cat/2.jpg, dog/1.jpg and 2 more"."""
    if not names:
        return f"{count} {reason}"
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return f"{count} {reason}: {', '.join(names)}{more}"


def quality(remarks: Mapping[str, int], about: About, names: Mapping[str, Sequence[str]]) -> list[str]:
    """Format the most frequent remarks on files, like "3 recordings: channel az is constant", with the first `names` of each."""
    most = sorted(remarks.items(), key=lambda each: (-each[1], each[0]))[:MOST_REMARKS]
    files = about.files.rpartition(" ")[2]
    return [
        named(f"{files.removesuffix('s') if count == 1 else files}: {remark}", count, names.get(remark, ()))
        for remark, count in most
    ]


@dataclass(frozen=True)
class DataReport:
    """Samples per class over all three sets, and skipped files by reason. Of files that were not read yet each counts as one sample.

    `hints` suggest classes for misspelt folders; `disappeared` are classes that had samples at the previous count; `names` are the first
    files of each reason and remark. `scenes`: groups of samples that belong together (`edge_fl.data.grouping`), 0 before they were read;
    `single` are classes whose samples are all of one; `depth` is that of the 16-bit pictures; `remarks` counts used files by what is to be
    said of their quality.
    """

    classes: tuple[str, ...]
    samples_per_class: tuple[int, ...]
    skipped: Mapping[str, int]
    hints: tuple[str, ...] = ()
    disappeared: tuple[str, ...] = ()
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scenes: int = 0
    single: tuple[str, ...] = ()
    depth: Depth = UNKNOWN_DEPTH
    kind: Kind = "picture"
    remarks: Mapping[str, int] = field(default_factory=dict)

    @property
    def about(self) -> About:
        """The words for these samples."""
        return ABOUT[self.kind]

    @property
    def samples(self) -> int:
        """Samples in all three sets."""
        return sum(self.samples_per_class)

    @property
    def with_samples(self) -> set[str]:
        """The classes that have samples."""
        return {name for name, count in zip(self.classes, self.samples_per_class, strict=True) if count}

    @property
    def per_class(self) -> str:
        """Samples of each class, such as "cat 3, dog 4"."""
        per_class = zip(self.classes, self.samples_per_class, strict=True)
        return ", ".join(f"{name} {count}" for name, count in per_class)

    @property
    def one_class(self) -> bool:
        """Whether only one class occurs; this is allowed and gives a constant head."""
        return sum(count > 0 for count in self.samples_per_class) == 1

    @property
    def local_notes(self) -> list[str]:
        """Remarks for this device only, because they contain names of files and folders."""
        return [
            *(
                f"skipped: {named(reason, count, names)}"
                for reason, count in sorted(self.skipped.items())
                if (names := self.names.get(reason))
            ),
            *self.hints,
            *(
                f"class {name!r} had {self.about.samples} before and has none now"
                for name in self.disappeared
            ),
            *self.scene_remarks,
            *quality(self.remarks, self.about, self.names),
        ]

    @property
    def notes(self) -> list[str]:
        """Remarks for the fleet's operator; they are sent, so they contain no file names."""
        notes = [
            f"{count} file{'' if count == 1 else 's'} {SKIPPED}{reason}"
            for reason, count in sorted(self.skipped.items())
        ]
        if self.disappeared:
            notes.append(f"{len(self.disappeared)} classes had {self.about.samples} before and have none now")
        notes += self._few_scenes
        if self.single:
            notes.append(
                f"{len(self.single)} classes have {self.about.samples} of one scene only: their accuracy cannot be measured"
            )
        if self.remarks:
            notes.append(
                f"{sum(self.remarks.values())} remarks on the quality of files: edge-fl device status"
            )
        notes += [self.depth.remark] if self.depth.remark else []
        return [*notes, "one_class"] if self.one_class else notes

    @property
    def owner_notes(self) -> list[str]:
        """`local_notes`, then those of `notes` that say something else."""
        unnamed = {reason: count for reason, count in self.skipped.items() if not self.names.get(reason)}
        others = replace(self, skipped=unnamed, disappeared=(), scenes=0, single=(), remarks={})
        return [*self.local_notes, *others.notes]

    @property
    def scene_remarks(self) -> list[str]:
        """Remarks about the accuracy, for this device only, because they contain names of classes."""
        return [
            *self._few_scenes,
            *(
                f"class {name!r}: all {self.about.samples} are of one scene; its accuracy cannot be measured"
                for name in self.single
            ),
        ]

    @property
    def _few_scenes(self) -> list[str]:
        return [remark] if (remark := grouping.few(self.samples, self.scenes, self.about.samples)) else []


NOTHING_COUNTED = DataReport((), (), {})
"""Before the first count."""


class DataRecord(Struct, frozen=True):
    """The report of the last count that succeeded. `why`: failure word of the last count, `problem`: its message; "" if it succeeded."""

    report: DataReport = NOTHING_COUNTED
    why: str = ""
    problem: str = ""


def read(folder: Path) -> DataRecord:
    """Return the record; an empty one if there is none."""
    return read_json(folder / FILE, DataRecord) or DataRecord()


def remember(
    folder: Path, report: DataReport, classes: Sequence[str], only: Sequence[str] = ()
) -> DataReport:
    """Store the report; return it with the classes that had samples before and have none now, if each list that is not empty has them."""
    before = read(folder).report
    gone = {*before.disappeared, *before.with_samples} - report.with_samples
    for wanted in filter(None, (classes, only)):
        gone &= {*wanted}
    report = replace(report, disappeared=tuple(sorted(gone)))
    _write(folder, DataRecord(report))
    return report


def remember_problem(folder: Path, why: str, problem: str) -> None:
    """Store why the data could not be used; the last count remains."""
    _write(folder, msgspec.structs.replace(read(folder), why=why, problem=problem))


def failure_word(error: Exception) -> Failure:
    """Return the failure word of an inspection that failed: not because of the data, for which the child has words of its own."""
    match error:
        case MemoryError():
            return Failure.OUT_OF_MEMORY
        case DeadlineError():
            return Failure.DEADLINE
        case KilledError():
            return Failure.KILLED
    return Failure.ERROR


@contextmanager
def noting_deaths(folder: Path) -> Iterator[None]:
    """Store the message of a KilledError for `device status`."""
    try:
        yield
    except KilledError as error:
        remember_problem(folder, Failure.KILLED, error.message)
        raise


def _write(folder: Path, record: DataRecord) -> None:
    if record != read(folder):
        with suppress(OSError):  # no folder yet, or a full disk: only the status misses it
            write_json(folder / FILE, record)
