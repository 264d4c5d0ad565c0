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
    """The files of one kind in a folder; `others` counts those of other kinds by what they are."""

    listing: FolderListing
    files: list[SampleFile]
    others: Counter[str]

    @property
    def classes(self) -> list[str]:
        """The classes, ascending."""
        return sorted({file.class_name for file in self.files})

    @property
    def domains(self) -> list[str]:
        """The domains, ascending; empty if the classes are directly in the folder."""
        return sorted({file.domain for file in self.files if file.domain})


def find(folder: Path, kind: Kind) -> SampleFolder:
    """List the files of a kind. Those of domains count only if no class is directly in the folder. Raises DataError without the folder."""
    about = ABOUT[kind]
    if not folder.is_dir():
        raise DataError(
            f"{text(folder)}: no such folder; expected one folder of {about.files} per class in it"
        )
    listing, others = walk(folder), Counter[str]()
    files = []
    for path in listing.files:
        parts = path.relative_to(folder).parts
        if path.suffix.lower() not in about.suffixes:
            others.update([ABOUT[other].files] if (other := kind_of(path)) else [])
        elif len(parts) in (2, 3) and (name := class_of(parts[-2])):
            files.append(SampleFile(path, name, composed(parts[0]) * (len(parts) == 3)))
    return SampleFolder(listing, [file for file in files if not file.domain] or files, others)


def read(files: Sequence[SampleFile], input: InputSpec, most: int = 0) -> tuple[Array, Indices]:
    """Return the samples of files [N, ...], and the number of the file of each [N]; none of a file that cannot be read.

    most: of one file, evenly spaced (0: all).
    """
    modality = modalities.of(input.kind)
    bits = pictures.depth_of([file.path for file in files]).bits if input.kind == "picture" else 0
    found, numbers = [np.empty((0, *input.shape), input.dtype)], []
    for number, file in enumerate(files):
        try:
            x = modality.read(file.path, input, bits=bits).samples
        except UnusableFileError:
            continue
        found.append(x[:: -(-len(x) // most)] if most and len(x) else x)
        numbers += [number] * len(found[-1])
    return np.concatenate(found), np.array(numbers, np.int64)
