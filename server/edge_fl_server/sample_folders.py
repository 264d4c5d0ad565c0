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

    kind: Kind
    listing: FolderListing
    files: list[SampleFile]
    others: list[str]

    @property
    def domains(self) -> list[str]:
        """The domains, ascending."""
        return sorted({file.domain for file in self.files if file.domain})

    def input(self, **chosen: float) -> InputSpec:
        """The input that the modality proposes for the files that can be opened; `chosen`: what is given of window_s and rate.

        Raises DataError.
        """
        modality, paths = modalities.of(self.kind), []
        for file in self.files:
            with suppress(UnusableFileError):
                modality.check(file.path)
                paths.append(file.path)
        if not paths:
            raise DataError(f"no usable {ABOUT[self.kind].files}")
        if self.kind == "table":
            return tables.propose(paths)[0]
        return modality.propose(paths, **{key: value for key, value in chosen.items() if value})


def find(folder: Path, kind: Kind) -> SampleFolder:
    """List the files of a kind. Those of domains count only if no class is directly in the folder. Raises DataError without the folder."""
    about = ABOUT[kind]
    is_file = kind == "table" and folder.is_file()
    if not (is_file or folder.is_dir()):
        raise DataError(
            f"{text(folder)}: no such folder; expected one folder of {about.files} per class in it"
        )
    listing, files, loose, others = (
        FolderListing([folder]) if is_file else walk(folder),
        [],
        [],
        Counter[str](),
    )
    for path in listing.files:
        parts = path.relative_to(folder).parts
        if path.suffix.lower() not in about.suffixes:
            others.update([ABOUT[other].files] if (other := kind_of(path)) else [])
        elif len(parts) < 2:
            loose.append(SampleFile(path, "", composed(path.stem)))
        elif len(parts) < 4 and (name := class_of(parts[-2])):
            files.append(SampleFile(path, name, composed(parts[0]) * (len(parts) == 3)))
    files = [file for file in files if not file.domain] or files
    if kind == "table" and not files:
        files = loose if len(loose) > 1 else [file._replace(domain="") for file in loose]
    remarks = [f"{count} {what} are left out" for what, count in sorted(others.items())]
    return SampleFolder(kind, listing, files, remarks)


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
