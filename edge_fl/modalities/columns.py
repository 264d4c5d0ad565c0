"""Columns of the files that people have, CSV with any delimiter, NPZ and Parquet, and what series and tables share.

The content of a file says what it is. A text cell matters only where the numbers of its column are asked for.
"""

from __future__ import annotations

import csv
import importlib
import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from edge_fl.errors import DataError, brief, shortened
from edge_fl.files import user_text
from edge_fl.files.npz import Array
from edge_fl.files.paths import composed, text
from edge_fl.inputs import InputSpec
from edge_fl.modalities import Source, UnusableFileError, opened, require_memory
from edge_fl.modalities.limits import LIMITS, FileLimits

Numbers = NDArray[np.float64]
COST = 12
"""Bytes of memory for a byte of a text file, if its numbers have 2 digits; 5 if they have 8."""
HEAD_BYTES = 2**16  # read to check a file
SAMPLE, BLOCK = 50, 4096  # lines from which the delimiter is found, and that are read at a time
EMPTY = frozenset({"", "nan", "nat", "na", "n/a", "#n/a", "null", "none", "-", "unknown", "unavailable"})
LARGEST = 3e38  # of a float32; a value beyond it is missing
_NAME_UNIT = re.compile(r"\s*(.*?)\s*(?:[\[(]([^\[(]*)[\])])?\s*")
# values with decimal commas or without decimals, separated by spaces
_DECIMAL_COMMAS = re.compile(r"\s*([+-]?\d+(,\d+)?(\s+|$))+")


class Columns(NamedTuple):
    """Columns of a file: names without units ("" for none), numbers (NaN for an empty cell) or text, and the line of each row.

    rate: of the rows in Hz, if an NPZ file states it, else 0.
    """

    source: Source
    names: tuple[str, ...]
    units: tuple[str, ...]
    cells: tuple[Numbers | list[str], ...]
    lines: Sequence[int]
    rate: float = 0.0

    def words(self, index: int) -> list[str]:
        """Return a column as text, "" for empty cells."""
        return [composed(word.strip()) for word in _words(self.cells[index])]

    def numeric(self, but: Collection[int]) -> list[int]:
        """Return the columns of numbers outside `but`; if others have names, those without are none. Raises UnusableFileError."""
        known = [index for index, name in enumerate(self.names) if name or not any(self.names)]
        found = [i for i in known if i not in but and not isinstance(self.cells[i], list)]
        if not found:
            raise UnusableFileError(self.source, "no column of numbers", shortened(self.names))
        return found

    def values(self, input: InputSpec | None, but: Collection[int]) -> Numbers:
        """Return the columns of an input [C, n], NaN where a value is missing; without one those of `numeric`. Raises UnusableFileError.

        They are found by name; if the input or the file has no names, all outside `but` are taken in their order.
        """
        found = [index for index in range(len(self.names)) if index not in but]
        if input is None:
            found = self.numeric(but)
        elif input.names and any(self.names):
            found = [self.place(name) for name in input.names]
        elif len(found) != input.channels:
            detail = f"{len(found)} without names, expected {input.channels}"
            raise UnusableFileError(self.source, "another number of columns", detail)
        x = np.stack([self._numbers(index) for index in found])
        x[~(np.abs(x) < LARGEST)] = np.nan
        return x

    def place(self, name: str) -> int:
        """Return the column of a name, whatever its case and unit. Raises UnusableFileError for none, or two."""
        found = [index for index, other in enumerate(self.names) if other.casefold() == key(name)]
        if len(found) != 1:
            reason = "two columns of one name" if found else "a column is missing"
            raise UnusableFileError(self.source, reason, f"{name!r}; the file has {shortened(self.names)}")
        return found[0]

    def _numbers(self, index: int) -> Numbers:
        values = self.cells[index]
        if not isinstance(values, list):
            return values
        texts = (row for row, cell in enumerate(values) if isinstance(_typed([cell]), list))
        row = next(texts, None)
        if row is None:  # some with decimal commas, others with points
            row = next(row for row, cell in enumerate(values) if "," in cell)
        where = f"line {self.lines[row]}, column {self.names[index] or index + 1}"
        detail = f"{where}: {brief(values[row])!r}, expected a number"
        raise UnusableFileError(self.source, "text in a column of numbers", detail)


def read(source: Source, limits: FileLimits, channels: int = 0, *, head: bool = False) -> Columns:
    """Read the columns of a file. Raises UnusableFileError.

    channels: of an array `x` [T, C] or [C, T] in an NPZ; 0: its shorter side. head: only the first lines of a text.
    """
    with opened(source) as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(4)
        file.seek(0)
        if start == b"PK\3\4":
            return _from_npz(source, file, limits, channels)
        if start == b"PAR1":
            return _from_parquet(source, file, limits)
        require_memory(source, 0 if head else COST * size, limits)
        content = file.read(HEAD_BYTES if head else size)
        if len(content) < size:  # whole lines, and whole characters of UTF-16
            content = content[: (content.rfind(b"\n") + 1) // 2 * 2]
        try:
            decoded = user_text.decode(content)
        except user_text.EncodingError as error:
            raise UnusableFileError(source, "not a text in UTF-8", str(error)) from error
        return _from_text(source, decoded)


def _from_npz(source: Source, file: BinaryIO, limits: FileLimits, channels: int) -> Columns:
    """Columns of the arrays `x` and `t`, or of one array per channel; with the `names` of x and `rate`, if they are there."""
    with zipfile.ZipFile(file) as archive:
        require_memory(source, 4 * sum(entry.file_size for entry in archive.infolist()), limits)
    with np.load(file, allow_pickle=False) as opened:
        arrays: dict[str, Array] = {name: opened[name] for name in opened.files}
    rate, names = float(arrays.pop("rate", np.zeros(()))), arrays.pop("names", np.empty(0))
    rate = rate if 0 < rate < np.inf else 0.0
    if "x" not in arrays:
        return _from_arrays(source, list(arrays.items()), rate)
    x = np.atleast_2d(arrays["x"])
    x = x.T if x.shape[1] == (channels or names.size or min(x.shape)) else x
    found = list(zip([str(name) for name in names.flat] or [""] * len(x), x, strict=True))
    return _from_arrays(source, [*found, *([("t", arrays["t"])] if "t" in arrays else [])], rate)


def _from_parquet(source: Source, file: BinaryIO, limits: FileLimits) -> Columns:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnusableFileError(source, "Parquet needs pip install pyarrow") from error
    opened = parquet.ParquetFile(file)
    require_memory(source, 32 * opened.metadata.num_rows * opened.metadata.num_columns, limits)
    table = opened.read()
    return _from_arrays(source, [(name, table[name].to_numpy()) for name in table.column_names])


def _from_arrays(source: Source, arrays: Sequence[tuple[str, Array]], rate: float = 0.0) -> Columns:
    if {array.ndim for _, array in arrays} != {1} or len({len(array) for _, array in arrays}) > 1:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays) or "nothing"
        detail = f"holds {shapes}; expected x [T, C] and perhaps t [T], or arrays [T] by channel"
        raise UnusableFileError(source, "arrays that are no recording", detail)
    names, units = zip(*(_name_unit(name) for name, _ in arrays), strict=True)
    texts = (np.datetime_as_string(array) if array.dtype.kind == "M" else array for _, array in arrays)
    cells = tuple(
        a.astype(np.float64) if a.dtype.kind in "biuf" else ["" if v is None else str(v) for v in a]
        for a in texts
    )
    return Columns(source, names, units, cells, range(1, len(cells[0]) + 1), rate)


def _from_text(source: Source, content: str) -> Columns:
    delimiter, width = _dialect(list(islice(filter(None, _lines(content)), SAMPLE)))
    reader = csv.reader(_lines(content), delimiter=delimiter, skipinitialspace=True)
    rows = ((reader.line_num, row) for row in reader if any(row))
    # a row of fewer cells before is a remark of the program that recorded it
    first = next((row for row in rows if 2 * len(row[1]) > width), None)
    if first is None:
        raise UnusableFileError(source, "empty", "no rows in it")
    header, after = [cell.strip() for cell in first[1]], chain([first], rows)
    while header and not header[-1]:  # a delimiter at the end
        header.pop()
    if any(cell and not isinstance(_typed([cell]), list) for cell in header):
        header = [""] * len(header)
    else:
        next(after)
    parts: list[list[Numbers | list[str]]] = [[] for _ in header]
    lines = array("L")
    while block := list(islice(after, BLOCK)):
        lines.extend(line for line, _ in block)
        for line, row in block:
            if len(row) > len(header) and any(cell.strip() for cell in row[len(header) :]):
                detail = f"line {line} has {len(row)} cells, expected {len(header)}"
                raise UnusableFileError(source, "rows of different lengths", detail)
        columns = zip_longest(header, *(row for _, row in block), fillvalue="")
        for part, column in zip(parts, columns, strict=False):
            part.append(_typed(list(column[1:])))
    names, units = zip(*map(_name_unit, header), strict=True)
    return Columns(source, names, units, tuple(map(_joined, parts)), lines)


def _joined(parts: list[Numbers | list[str]]) -> Numbers | list[str]:
    """Join the blocks of a column, which is text if one of them is."""
    if any(isinstance(part, list) for part in parts):
        return [word for part in parts for word in _words(part)]
    return np.concatenate([np.empty(0), *parts])


def _words(values: Numbers | list[str]) -> list[str]:
    if isinstance(values, list):
        return values
    return ["" if value != value else f"{value:.15g}" for value in values]


def key(name: str) -> str:
    """Return the form in which names of columns are compared."""
    return _name_unit(name)[0].casefold()


def _name_unit(name: str) -> tuple[str, str]:
    found = _NAME_UNIT.fullmatch(composed(name))
    return (found[1], found[2] or "") if found else (name.strip(), "")


def _typed(cells: list[str]) -> Numbers | list[str]:
    """Convert cells with decimal points or commas to float64, NaN for empty ones; return them as they are if one is text."""
    with suppress(ValueError):
        return np.array(list(map(float, cells)))
    joined = "\n".join(cells)
    decimal = joined.replace(",", ".").split("\n") if "," in joined and "." not in joined else cells
    with suppress(ValueError):
        return np.array([np.nan if cell.strip().lower() in EMPTY else float(cell) for cell in decimal])
    return cells


def _lines(content: str) -> Iterator[str]:
    """Yield the lines of a text, "" for comments and for the first line "sep=;" of Excel."""
    start = 0
    while start < len(content):
        end = content.find("\n", start) % (len(content) + 1)  # -1: the end
        yield "" if content.startswith(("#", "sep="), start) else content[start:end]
        start = end + 1


def _dialect(lines: Sequence[str]) -> tuple[str, int]:
    """Return the delimiter by which most lines have the same number of cells, and this number."""
    for delimiter in "\t;, ":
        widths = Counter(map(len, csv.reader(lines, delimiter=delimiter, skipinitialspace=True)))
        width, count = max(widths.items(), key=lambda pair: pair[1], default=(1, 0))
        if delimiter == "," and width > 1 and _DECIMAL_COMMAS.fullmatch(lines[-1]):
            width = 1 if "," not in lines[0] or " " in lines[-1].strip() else width
        if width > 1 and 2 * count > len(lines):
            return delimiter, width
    return "\t", 1


def common(found: Mapping[Path, Sequence[str]]) -> tuple[str, ...]:
    """Return the names of columns that most files have. Raises DataError, which names the first file that lacks one."""
    counts = Counter(chain.from_iterable(found.values()))
    shared = tuple(name for name, count in counts.items() if 2 * count > len(found))
    for path, names in found.items():
        if lacking := [name for name in shared or counts if name not in names]:
            raise DataError(f"{text(path)}: no column of numbers {shortened(lacking)}, as other files have")
    return shared


def finite(x: Array, where: object) -> NDArray[np.float32]:
    """Return samples as float32. Raises DataError, which begins with `where`, for text, and for NaN, whose place it names."""
    if x.dtype.kind not in "biuf":
        raise DataError(f"{where}: {x.dtype} {list(x.shape)}, expected numbers")
    if len(wrong := np.argwhere(~(np.abs(x) < LARGEST))):
        raise DataError(f"{where}: {x[tuple(wrong[0])]} at {wrong[0].tolist()}, expected finite numbers")
    return x.astype(np.float32, order="C", copy=False)


def fit(x: Array, input: InputSpec, where: object) -> Array:
    """Return samples in the shape of `input`. Raises DataError, which begins with `where`, for another shape, or for NaN."""
    if x.shape[1:] != input.shape:
        advice = "; pass x.transpose(0, 2, 1)" if x.shape[:0:-1] == input.shape and x.ndim == 3 else ""
        expected = f"{list(input.shape)} [{', '.join(input.axes)}]"
        raise DataError(f"{where}: samples {list(x.shape[1:])}, the extractor takes {expected}{advice}")
    return finite(x, where)


def input_of(x: NDArray[np.float32], rows: NDArray[np.int64], given: InputSpec | None) -> InputSpec:
    """Return `given` with the shape of samples [N, C, ...] or [N, T], and mean and std per channel of those at `rows`.

    A constant channel has std 1. In float64, a channel at a time. Raises DataError without `given`.
    """
    if given is None:
        raise DataError(f"samples {list(x.shape[1:])}: expected an input, which says what their axes are")
    channels = x[:, None] if given.axes == "T" else x
    values = (channels[rows, channel] for channel in range(channels.shape[1]))
    moments = [(value.mean(dtype=np.float64), value.std(dtype=np.float64)) for value in values]
    mean = tuple(float(f"{mean:.9g}") for mean, _ in moments)  # digits, not decimals: microvolts
    std = tuple(float(f"{std:.9g}") if std > 1e-6 * abs(mean) else 1.0 for mean, std in moments)
    return structs.replace(given, shape=x.shape[1:], mean=mean, std=std)


def check(path: Path, limits: FileLimits = LIMITS) -> None:
    """Read the first lines of a file. Raises UnusableFileError as `read`, apart from damage behind them."""
    read(path, limits, head=True)
