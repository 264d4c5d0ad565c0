"""Samples of the server by class: FOLDER/CLASS/FILE, or FOLDER/DOMAIN/CLASS/FILE with a folder for each person, room or site.

The classes of rows may be in a column instead, of FOLDER/FILE or FILE; then each of several files is a domain.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_fl import modalities
from edge_fl.data.class_names import class_of
from edge_fl.data.samples import Array, Indices
from edge_fl.errors import DataError
from edge_fl.files.folder import FolderListing, walk
from edge_fl.files.paths import composed, text
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import ABOUT, UnusableFileError, kind_of, pictures, tables


class SampleFile(NamedTuple):
    """A file of samples with its class ("": in a column), and its domain ("": there are none)."""

    path: Path
    class_name: str
    domain: str


class SamplesRead(NamedTuple):
    """Samples x [N, ...] with their class and group ("": none), the number of the file of each [N], and why other files have none."""

    x: Array
    classes: list[str]
    groups: list[str]
    numbers: Indices
    unusable: list[str]


@dataclass(frozen=True)
class SampleFolder:
    """The files of one kind in a folder; `others`: remarks about those of other kinds."""

    folder: Path
    kind: Kind
    listing: FolderListing
    files: list[SampleFile]
    others: list[str]

    @property
    def domains(self) -> list[str]:
        """The domains, ascending."""
        return sorted({file.domain for file in self.files if file.domain})

    def input(self, **chosen: float) -> InputSpec:
        """The input that is proposed for the files that can be opened; chosen: window_s and rate, if not 0. Raises DataError."""
        modality, paths = modalities.of(self.kind), []
        for file in self.files:
            with suppress(UnusableFileError):
                modality.check(file.path)
                paths.append(file.path)
        if not paths:
            raise DataError(f"{text(self.folder)}: no usable {ABOUT[self.kind].files}")
        if self.kind == "table":
            return tables.propose(paths)[0]
        return modality.propose(paths, **{key: value for key, value in chosen.items() if value})


def find(folder: Path, kind: Kind) -> SampleFolder:
    """List the files of a kind. Those of domains count only if no class is directly in the folder. Raises DataError without the folder."""
    suffixes, what = ABOUT[kind].suffixes, ABOUT[kind].files
    is_file = kind == "table" and folder.is_file()
    if not (is_file or folder.is_dir()):
        raise DataError(f"{text(folder)}: no such folder; expected one folder of {what} per class in it")
    listing = FolderListing([folder]) if is_file else walk(folder)
    files, loose = list[SampleFile](), list[Path]()
    for path in (path for path in listing.files if path.suffix.lower() in suffixes):
        *around, _ = ("", *path.relative_to(folder).parts)
        if len(around) < 2:
            loose.append(path)
        elif len(around) < 4 and (name := class_of(around[-1])):
            files.append(SampleFile(path, name, composed(around[1]) * (len(around) == 3)))
    files = [file for file in files if not file.domain] or files
    if kind == "table" and not files:
        files = [SampleFile(path, "", composed(path.stem) * (len(loose) > 1)) for path in loose]
    others = (kind_of(path) for path in listing.files if path.suffix.lower() not in suffixes)
    counts = Counter(ABOUT[other].files for other in others if other).items()
    return SampleFolder(folder, kind, listing, files, [f"{n} {other} are left out" for other, n in counts])


def read(files: Sequence[SampleFile], input: InputSpec, most: int = 0) -> SamplesRead:
    """Read the samples of files; at most `most` of one file, evenly spaced (0: all)."""
    modality = modalities.of(input.kind)
    bits = pictures.depth_of([file.path for file in files]).bits if input.kind == "picture" else 0
    found = [np.empty((0, *input.shape), input.dtype)]
    classes, groups, numbers, unusable = list[str](), list[str](), list[int](), list[str]()
    for number, file in enumerate(files):
        try:
            if file.class_name:
                x = modality.read(file.path, input, bits=bits).samples
                names, own = [file.class_name] * len(x), [f"{number}" * bool(input.rate)] * len(x)
            else:
                rows = tables.rows(file.path, input)
                x, names = rows.x, [rows.classes[label] for label in rows.y]
                own = [f"{number} {group}" for group in rows.groups] or [""] * len(x)
        except UnusableFileError as error:
            unusable.append(error.message)
            continue
        step = -(-len(x) // most) if most and len(x) else 1
        found.append(x[::step])
        classes += names[::step]
        groups += own[::step]
        numbers += [number] * len(found[-1])
    return SamplesRead(np.concatenate(found), classes, groups, np.array(numbers, np.int64), unusable)
