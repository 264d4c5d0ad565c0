"""Tables: every row of a CSV file is a sample of several columns of numbers.

The class of a row is in a column of the file, or the file is in a folder of its class. The class column is the one that is asked for, or
has one of the names CLASSES, or is the last text column. A column named as in GROUPS tells which rows belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from edge_fl.errors import DataError, shortened
from edge_fl.files.npz import Array
from edge_fl.files.paths import text
from edge_fl.inputs import InputSpec
from edge_fl.modalities import SIDE, Reading, Thumbnails, UnusableFileError, columns, require_kind
from edge_fl.modalities.columns import Columns, Source
from edge_fl.modalities.limits import FULL_BITS, LIMITS, FileLimits
from edge_fl.seeds import generator

Values = NDArray[np.float32]
CLASSES = ("class", "label", "target", "species")
GROUPS = ("group", "site")


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
    """Return the rows of a file with their classes: `classes`, or those of the file in order.

    Without an input all columns of numbers are taken. Rows without a class, of another class, or with an empty cell are left out, with a
    remark. Raises UnusableFileError.
    """
    sheet = columns.read(path, limits)
    index = _class_column(sheet, class_column)
    if index is None:
        raise UnusableFileError(
            path, "no class column", f"expected {' or '.join(CLASSES)}, or a column of text"
        )
    x, complete, remarks = _numbers(sheet, input, index)
    words = np.array(sheet.words(index), str)
    names = tuple(classes) or _in_order(words)
    ids = {name: number for number, name in enumerate(names)}
    y = np.array([ids.get(word, -1) for word in words], np.int64)
    if lacking := int(np.sum(words == "")):
        remarks.append(f"{lacking} rows without a class, left out")
    if others := sorted(set(words[(y < 0) & (words != "")].tolist())):
        remarks.append(
            f"{np.sum((y < 0) & (words != ''))} rows of other classes ({shortened(others, 5)}), left out"
        )
    kept = complete & (y >= 0)
    groups = [sheet.words(number) for number in _group_columns(sheet)[:1]]
    return Rows(
        x[kept], y[kept], tuple(np.array(groups[0], object)[kept]) if groups else (), names, tuple(remarks)
    )


def propose(files: Sequence[Path], class_column: str = "") -> tuple[InputSpec, tuple[str, ...]]:
    """Return an input with the columns of numbers of most files, and the classes in their class column, none without such a column.

    Raises UnusableFileError; DataError, which names the first file that lacks a column.
    """
    sheets = {path: columns.read(path, LIMITS) for path in files}
    found, words = dict[Path, tuple[str, ...]](), set[str]()
    for path, sheet in sheets.items():
        index = _class_column(sheet, class_column)
        found[path] = tuple(sheet.names[number] for number in _features(sheet, index))
        words.update(() if index is None else sheet.words(index))
    names = columns.common(found)
    shape = (len(names) or len(next(iter(found.values()))),)
    return InputSpec(shape, (0.0,), (1.0,), "F", "float32", names=names), _in_order(
        np.array(sorted(words), str)
    )


def arrays(x: Array, where: str) -> Values:
    """Convert rows [N, F] to float32. Raises DataError, which begins with `where`."""
    if x.ndim != 2:
        raise DataError(f"{where}: rows {list(x.shape)}, expected [N, F]")
    return columns.finite(x, where)


def fit(x: Array, input: InputSpec, where: object = "rows") -> Values:
    """Return rows in the shape of `input`. Raises DataError, which begins with `where`, for any other shape."""
    require_kind(input, "table", where)
    found = arrays(x, str(where))
    if found.shape[1:] != input.shape:
        names = f" ({shortened(input.names)})" if input.names else ""
        raise DataError(f"{where}: {found.shape[1]} columns, the extractor takes {input.channels}{names}")
    return found


def input_of(x: Values, rows: NDArray[np.int64], given: InputSpec | None = None) -> InputSpec:
    """Return the input of rows [N, F], with mean and std of those at `rows`, and all else as `given`."""
    mean, std = columns.moments(x, rows)
    given = given or InputSpec(x.shape[1:], axes="F", dtype="float32")
    return structs.replace(given, shape=x.shape[1:], mean=mean, std=std)


def check(path: Path, limits: FileLimits = LIMITS) -> None:
    """Read the first lines of a file. Raises UnusableFileError as `read`, apart from damage behind them."""
    columns.read(path, limits, head=True)


def read(
    path: Source, input: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
) -> Reading:
    """Return the rows [n, F] of a file without empty cells, whatever their class. Raises UnusableFileError. bits: not used."""
    sheet = columns.read(path, limits)
    x, complete, remarks = _numbers(sheet, input, _class_column(sheet, ""))
    if not complete.any():
        raise UnusableFileError(path, "no complete row", "; ".join(remarks))
    return Reading(x[complete], tuple(remarks))


def synthetic(input: InputSpec, count: int, seed: int) -> Values:
    """Rows [N, F] of normal values with the input's mean and std."""
    values = generator(seed, "release.synthetic").standard_normal((count, input.channels))
    found: Values = (np.array(input.mean) + np.array(input.std) * values).astype(np.float32)
    return found


def thumbnails(x: Values) -> Thumbnails:
    """A hash of each row, uint8 [n, 256]: only equal rows are near duplicates, whatever the scales of their columns."""
    hashes = b"".join(hashlib.shake_128(row.tobytes()).digest(SIDE * SIDE) for row in x)
    return np.frombuffer(hashes, np.uint8).reshape(len(x), SIDE * SIDE)


def side(x: Values) -> int:
    """Return 0: rows have no size in pixels."""
    return 0


def _class_column(sheet: Columns, name: str) -> int | None:
    """Return the column of classes, None if there is none. Raises UnusableFileError if that of a name is missing."""
    if name:
        return sheet.place(name)
    named = [index for index, other in enumerate(sheet.names) if other.casefold() in CLASSES]
    of_text = [index for index, values in enumerate(sheet.values) if isinstance(values, list)]
    rest = [index for index in of_text if index not in _group_columns(sheet)]
    return next(iter([*named, *reversed(rest)]), None)


def _group_columns(sheet: Columns) -> list[int]:
    return [index for index, name in enumerate(sheet.names) if name.casefold() in GROUPS]


def _features(sheet: Columns, class_index: int | None) -> list[int]:
    """Return the columns of numbers that are neither classes nor groups. Raises UnusableFileError if there are none."""
    if not (found := sheet.numeric({class_index, *_group_columns(sheet)})):
        raise UnusableFileError(sheet.source, "no column of numbers", shortened(sheet.names))
    return found


def _numbers(
    sheet: Columns, input: InputSpec | None, class_index: int | None
) -> tuple[Values, NDArray[np.bool_], list[str]]:
    """Return the columns of an input [n, F], which rows have no empty cell, and a remark on the others. Raises UnusableFileError."""
    if input:
        require_kind(input, "table", text(sheet.source) if isinstance(sheet.source, Path) else "table")
        x = sheet.chosen(input.names, input.channels, {class_index, *_group_columns(sheet)})
    else:
        x = np.stack([sheet.numbers(index) for index in _features(sheet, class_index)])
    complete: NDArray[np.bool_] = np.isfinite(x).all(axis=0)
    empty = np.flatnonzero(~complete)
    remarks = (
        [f"{len(empty)} rows with an empty cell, left out; the first is line {sheet.lines[empty[0]]}"]
        if len(empty)
        else []
    )
    return x.T.astype(np.float32), complete, remarks


def _in_order(words: NDArray[np.str_]) -> tuple[str, ...]:
    """Return different class names in order, numbers by size."""
    names = sorted(set(words.tolist()) - {""})
    numbers = columns.as_numbers(names)
    return tuple(names if numbers is None else (names[index] for index in np.argsort(numbers)))
