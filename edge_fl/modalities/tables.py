"""Tables: every row of a CSV file is a sample of several columns of numbers.

The class of a row is in a column of the file, or the file is in a folder of its class. The class column is the one that is asked for, or
has one of the names CLASSES, or is the last text column. Rows with the same value in a column of GROUPS belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import DataError, shortened
from edge_fl.files.npz import Array
from edge_fl.inputs import InputSpec
from edge_fl.modalities import Reading, Source, UnusableFileError, columns, require_kind
from edge_fl.modalities.columns import Columns
from edge_fl.modalities.limits import FULL_BITS, LIMITS, FileLimits
from edge_fl.seeds import generator

Values = NDArray[np.float32]
CLASSES = ("class", "label", "target", "species")
GROUPS = ("group", "site")

check, fit, input_of = columns.check, columns.fit, columns.input_of


class Rows(NamedTuple):
    """Rows x [N, F] with class ids y int64 [N], the names of their groups [N] (empty: there are none), and the class list."""

    x: Values
    y: NDArray[np.int64]
    groups: tuple[str, ...]
    classes: tuple[str, ...]
    remarks: tuple[str, ...]


def rows(
    path: Source,
    input: InputSpec | None = None,
    classes: Sequence[str] = (),
    class_column: str = "",
    limits: FileLimits = LIMITS,
) -> Rows:
    """Return the rows of a file with their classes, which are `classes`, or those of the file in order. Raises UnusableFileError.

    Without an input all columns of numbers are taken. Rows of other classes, without a class or with an empty cell are left out, with a
    remark.
    """
    sheet = columns.read(path, limits)
    of_class, groups = _roles(sheet, class_column)
    if of_class < 0:
        raise UnusableFileError(
            path, "no class column", f"expected {' or '.join(CLASSES)}, or a column of text"
        )
    x, kept, remarks = _complete(sheet, input, {of_class, *groups})
    words = sheet.words(of_class)
    classes = tuple(classes) or _in_order(words)
    numbers = {name: number for number, name in enumerate(classes)}
    if other := [word for word in words if word not in numbers]:
        names = shortened([repr(name) for name in sorted(set(other))], 5)
        remarks.append(f"{len(other)} rows of other classes, {names}, are left out")
    ids = np.array([numbers.get(word, -1) for word in words], np.int64)
    kept &= ids >= 0
    found = [np.array(sheet.words(group), str)[kept].tolist() for group in groups[:1]]
    return Rows(x[kept], ids[kept], tuple(found[0]) if found else (), classes, tuple(remarks))


def propose(files: Sequence[Path], class_column: str = "") -> tuple[InputSpec, tuple[str, ...]]:
    """Return an input with the columns of numbers of most files, and their classes, none without a class column.

    Raises UnusableFileError; DataError, which names the first file that lacks a column.
    """
    found, words = dict[Path, list[str]](), set[str]()
    for path in files:
        sheet = columns.read(path, LIMITS)
        of_class, groups = _roles(sheet, class_column)
        found[path] = [sheet.names[index] or f"{index + 1}" for index in sheet.numeric({of_class, *groups})]
        words.update(sheet.words(of_class) if of_class >= 0 else ())
    names = columns.common(found)
    return InputSpec((len(names),), (0.0,), (1.0,), "F", "float32", names=names), _in_order(words)


def arrays(x: Array, where: str) -> Values:
    """Convert rows [N, F] to float32. Raises DataError, which begins with `where`."""
    if x.ndim != 2:
        raise DataError(f"{where}: rows {list(x.shape)}, expected [N, F]")
    return columns.finite(x, where)


def read(
    path: Source, input: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
) -> Reading:
    """Return the rows [n, F] of a file, whatever their class, without those with an empty cell. Raises UnusableFileError.

    bits: not used.
    """
    sheet = columns.read(path, limits)
    of_class, groups = _roles(sheet, "")
    x, kept, remarks = _complete(sheet, input, {of_class, *groups})
    return Reading(x[kept], tuple(remarks))


def synthetic(input: InputSpec, count: int, seed: int) -> Values:
    """Rows [N, F] of normal values with the input's mean and std."""
    values = generator(seed, "release.synthetic").standard_normal((count, input.channels))
    return np.asarray(np.array(input.mean) + np.array(input.std) * values, np.float32)


def _roles(sheet: Columns, class_column: str) -> tuple[int, list[int]]:
    """Return the column of classes, -1 for none, and those of groups. Raises UnusableFileError if `class_column` is missing."""
    groups = [index for index, name in enumerate(sheet.names) if name.casefold() in GROUPS]
    named = [index for index, name in enumerate(sheet.names) if name.casefold() in CLASSES]
    texts = [i for i, cells in enumerate(sheet.cells) if isinstance(cells, list) and i not in groups]
    return sheet.place(class_column) if class_column else [-1, *texts, *named[:1]][-1], groups


def _complete(
    sheet: Columns, input: InputSpec | None, but: set[int]
) -> tuple[Values, NDArray[np.bool_], list[str]]:
    """Return rows [n, F], which of them have no empty cell [n], and a remark on the others. Raises UnusableFileError."""
    if input:
        require_kind(input, "table", "rows")
    x = sheet.values(input, but)
    complete = np.asarray(np.isfinite(x).all(axis=0))
    remarks = list[str]()
    if empty := [line for line, is_complete in zip(sheet.lines, complete, strict=True) if not is_complete]:
        remarks.append(f"{len(empty)} rows with an empty cell are left out, the first in line {empty[0]}")
    return x.T.astype(np.float32), complete, remarks


def _in_order(words: Iterable[str]) -> tuple[str, ...]:
    """Return the different class names in order, numbers by their size."""
    names = sorted({str(word) for word in words} - {""})
    with suppress(ValueError):
        names.sort(key=float)
    return tuple(names)
