"""Samples of the server by class: FOLDER/CLASS/FILE, or FOLDER/DOMAIN/CLASS/FILE with a folder for each person, room or site."""

from collections import Counter
from collections.abc import Sequence
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
from edge_fl.modalities import ABOUT, UnusableFileError, kind_of, pictures


class SampleFile(NamedTuple):
    """A file of samples with its class, and its domain ("": there are none)."""

    path: Path
    class_name: str
    domain: str = ""


@dataclass(frozen=True)
class SampleFolder:
    """The files of one kind in a folder."""

    kind: Kind
    listing: FolderListing
    files: list[SampleFile]

    @property
    def classes(self) -> list[str]:
        """The classes, ascending."""
        return sorted({file.class_name for file in self.files})

    @property
    def domains(self) -> list[str]:
        """The domains, ascending; empty if the classes are directly in the folder."""
        return sorted({file.domain for file in self.files if file.domain})

    def others(self) -> list[str]:
        """Remarks about files of other kinds: "2 WAV or FLAC recordings are left out"."""
        suffixes = ABOUT[self.kind].suffixes
        kinds = (kind_of(path) for path in self.listing.files if path.suffix.lower() not in suffixes)
        counts = Counter(ABOUT[kind].files for kind in kinds if kind)
        return [f"{count} {files} are left out" for files, count in sorted(counts.items())]

    def input(self, **chosen: float) -> InputSpec:
        """The input that its modality proposes for the files; `chosen`: what is given of window_s and rate. Raises DataError."""
        given = {key: value for key, value in chosen.items() if value}
        return modalities.of(self.kind).propose([file.path for file in self.files], **given)


def find(folder: Path, kind: Kind) -> SampleFolder:
    """List the files of a kind. Those of domains count only if no class is directly in the folder. Raises DataError without the folder."""
    about = ABOUT[kind]
    if not folder.is_dir():
        raise DataError(
            f"{text(folder)}: no such folder; expected one folder of {about.files} per class in it"
        )
    listing, files = walk(folder), []
    for path in listing.files:
        parts = path.relative_to(folder).parts
        if len(parts) in (2, 3) and path.suffix.lower() in about.suffixes and (name := class_of(parts[-2])):
            files.append(SampleFile(path, name, composed(parts[0]) * (len(parts) == 3)))
    return SampleFolder(kind, listing, [file for file in files if not file.domain] or files)


def kind_in(folder: Path) -> Kind:
    """The kind of most files in a folder; of CSV files that is a series."""
    kinds = Counter(kind for path in walk(folder).files if (kind := kind_of(path)))
    return kinds.most_common(1)[0][0] if kinds else "picture"


class SamplesRead(NamedTuple):
    """Samples [N, ...], the number of the file of each [N], and why other files have none."""

    x: Array
    numbers: Indices
    unusable: list[str]


def read(files: Sequence[SampleFile], input: InputSpec, most: int = 0) -> SamplesRead:
    """Read the samples of files; at most `most` of one file, evenly spaced (0: all)."""
    modality = modalities.of(input.kind)
    bits = pictures.depth_of([file.path for file in files]).bits if input.kind == "picture" else 0
    found, numbers, unusable = [np.empty((0, *input.shape), input.dtype)], [], []
    for number, file in enumerate(files):
        try:
            x = modality.read(file.path, input, bits=bits).samples
        except UnusableFileError as error:
            unusable.append(error.message)
            continue
        found.append(x[:: -(-len(x) // most)] if most and len(x) else x)
        numbers += [number] * len(found[-1])
    return SamplesRead(np.concatenate(found), np.array(numbers, np.int64), unusable)
