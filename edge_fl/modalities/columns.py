"""Columns of the files that people have: CSV with any delimiter, NPZ and Parquet, told apart by their content.

A file is read once, in memory of about COST times its size. A column holds numbers or text, whichever its cells are; text matters only
where its numbers are asked for.
"""

from __future__ import annotations

import csv
import importlib
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import DataError, brief, shortened
from edge_fl.files import user_text
from edge_fl.files.folder import unusable
from edge_fl.files.npz import Array
from edge_fl.files.paths import composed, text
from edge_fl.modalities import UnusableFileError
from edge_fl.modalities.limits import MB, FileLimits

Numbers = NDArray[np.float64]
Source: TypeAlias = Path | BinaryIO
COST = 8
"""Bytes of memory for a byte of a text file: its text, its numbers, and windows of them."""
HEAD_BYTES = 2**16
SAMPLE, BLOCK = 50, 4096  # lines
ROWS = 8192
EMPTY = frozenset({"", "nan", "nat", "na", "n/a", "#n/a", "null", "none", "-", "unknown", "unavailable"})
"""Cells without a value, in lower case."""
LARGEST = 3e38  # of a float32; what is beyond it counts as missing
_UNIT = re.compile(r"(.*\S)\s*[\[(](.*)[\])]")
# values between spaces, whole or with decimal commas
_DECIMAL_COMMAS = re.compile(r"\s*([+-]?\d+(,\d+)?(\s+|$))+")


class Columns(NamedTuple):
    """Columns of a file with n rows.

    names: without units; "" for a column without a name. units: "" for none. values: float64 [n] with NaN for empty cells, or the cells of a text
    column. lines [n]: of each row in the file. rate: in Hz, if an NPZ file states it.
    """

    source: Source
    names: tuple[str, ...]
    units: tuple[str, ...]
    values: tuple[Numbers | list[str], ...]
    lines: Sequence[int]
    rate: float = 0.0

    def numbers(self, index: int) -> Numbers:
        """Return a column. Raises UnusableFileError if one of its cells is text."""
        values = self.values[index]
        if isinstance(values, list):
            row = next((row for row, cell in enumerate(values) if as_numbers([cell]) is None), 0)
            name = self.names[index] or f"{index + 1}"
            detail = f"line {self.lines[row]}, column {name}: {brief(values[row])!r}, expected a number"
            raise UnusableFileError(self.source, "text in a column of numbers", detail)
        return values

    def words(self, index: int) -> list[str]:
        """Return the cells of a column as text, "" for empty ones."""
        values = self.values[index]
        if isinstance(values, list):
            return [composed(cell.strip()) for cell in values]
        return ["" if value != value else f"{value:.15g}" for value in values]

    def numeric(self, but: Collection[int | None] = ()) -> list[int]:
        """Return the columns of numbers outside `but`, without those that lack a name where others have one."""
        found = [i for i, cells in enumerate(self.values) if i not in but and not isinstance(cells, list)]
        return [index for index in found if self.names[index]] or found

    def chosen(self, names: Sequence[str], count: int, but: Collection[int | None] = ()) -> Numbers:
        """Return `count` columns [count, n], NaN where a value is missing. Raises UnusableFileError.

        They are found by `names`; if there are none, here or in the file, all columns outside `but` are taken in their order.
        """
        indices = [index for index in range(len(self.names)) if index not in but]
        if names and any(self.names):
            indices = [self.place(name) for name in names]
        elif len(indices) != count:
            detail = f"{len(indices)} without names, expected {count}"
            raise UnusableFileError(self.source, "another number of columns", detail)
        found = np.stack([self.numbers(index) for index in indices])
        found[~(np.abs(found) < LARGEST)] = np.nan
        return found

    def place(self, name: str) -> int:
        """Return the column of a name. Raises UnusableFileError if there is none, or more than one."""
        found = [index for index, other in enumerate(self.names) if other.casefold() == key(name)]
        if len(found) != 1:
            reason = "two columns of one name" if found else "a column is missing"
            known = shortened([other for other in self.names if other])
            raise UnusableFileError(self.source, reason, f"{name!r}; the file has {known}")
        return found[0]


def key(name: str) -> str:
    """Return the form in which names are compared: in lower case, without blanks around it and a unit in brackets."""
    return split_unit(name)[0].casefold()


def split_unit(name: str) -> tuple[str, str]:
    """Split "ax [g]" or "ax (g)" into a name and a unit."""
    name = composed(name.strip())
    found = _UNIT.fullmatch(name)
    return (found[1], found[2].strip()) if found else (name, "")


def read(source: Source, limits: FileLimits, channels: int = 0, *, head: bool = False) -> Columns:
    """Read the columns of a file. Raises UnusableFileError.

    channels: of an array `x` [T, C] or [C, T] in an NPZ file; 0: its shorter side. head: read only the first lines of a text.
    """
    try:
        if isinstance(source, Path) and (reason := unusable(source)):
            raise UnusableFileError(source, reason, passing=True)
        with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(4)
            file.seek(0)
            if start == b"PK\3\4":
                return _from_npz(source, file, limits, channels)
            if start == b"PAR1":
                return _from_parquet(source, file, limits)
            if not head:
                require_memory(source, COST * size, limits)
            content = file.read(HEAD_BYTES if head else size)
        if len(content) < size:  # whole lines; in UTF-16 whole characters
            content = content[
                : content.rfind(b"\n") // 2 * 2 if content[:2] in user_text.UTF16 else content.rfind(b"\n")
            ]
        return _from_text(source, user_text.decode(content))
    except UnusableFileError:
        raise
    except MemoryError as error:
        raise UnusableFileError(source, "out of memory", passing=True) from error
    except user_text.EncodingError as error:
        raise UnusableFileError(source, "not a text in UTF-8", str(error)) from error
    except Exception as error:  # a malformed archive may cause an exception of any type
        if isinstance(error, OSError) and error.errno is not None:
            raise UnusableFileError(source, (error.strerror or "unreadable").lower(), passing=True) from error
        raise UnusableFileError(source, "damaged", brief(f"{type(error).__name__}: {error}")) from error


def require_memory(source: Source, needed: float, limits: FileLimits) -> None:
    """Raise UnusableFileError if the bytes that a file takes in memory are above the limits."""
    allowed = min(limits.decoding_bytes, limits.max_bytes)
    if needed > allowed:
        detail = (
            f"it takes about {needed / MB:.0f} MB, allowed are {allowed / MB:.0f} MB; divide the recording"
        )
        raise UnusableFileError(source, "too large for this board", detail)


def _from_npz(source: Source, file: BinaryIO, limits: FileLimits, channels: int) -> Columns:
    """Columns of the arrays `x` and `t`, or of one array per channel; with `names` of x and `rate`, if they are there."""
    with zipfile.ZipFile(file) as archive:
        require_memory(source, 4 * sum(entry.file_size for entry in archive.infolist()), limits)
    with np.load(file, allow_pickle=False) as archive:
        arrays: dict[str, Array] = {name: archive[name] for name in archive.files}
    rate, names = float(arrays.pop("rate", np.zeros(()))), arrays.pop("names", np.empty(0)).reshape(-1)
    if "x" not in arrays:
        return _from_arrays(source, arrays.items(), rate)
    x = np.atleast_2d(arrays["x"])
    x = x.T if x.shape[1] == (channels or len(names) or min(x.shape)) else x
    clock = [("t", arrays["t"])] if "t" in arrays else []
    return _from_arrays(
        source, [*zip(map(str, names) if len(names) else [""] * len(x), x, strict=True), *clock], rate
    )


def _from_parquet(source: Source, file: BinaryIO, limits: FileLimits) -> Columns:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnusableFileError(source, "Parquet needs pip install pyarrow") from error
    opened = parquet.ParquetFile(file)
    require_memory(source, 32 * opened.metadata.num_rows * opened.metadata.num_columns, limits)
    table = opened.read()
    return _from_arrays(source, [(name, table[name].to_numpy()) for name in table.column_names])


def _from_arrays(source: Source, arrays: Iterable[tuple[str, Array]], rate: float = 0.0) -> Columns:
    found = list(arrays)
    if not found or any(array.ndim != 1 or len(array) != len(found[0][1]) for _, array in found):
        shapes = ", ".join(f"{name or 'x'} {list(array.shape)}" for name, array in found) or "nothing"
        detail = (
            f"holds {shapes}; expected x [T, C] and perhaps t [T], or one array per channel, of one length"
        )
        raise UnusableFileError(source, "arrays that are no recording", detail)
    names, units = zip(*(split_unit(name) for name, _ in found), strict=True)
    values: list[Numbers | list[str]] = []
    for _, array in found:
        if array.dtype.kind == "M":  # times, as in a text file
            array = np.datetime_as_string(array)
        numbers = array.dtype.kind in "biuf"
        values.append(
            array.astype(np.float64) if numbers else ["" if cell is None else str(cell) for cell in array]
        )
    return Columns(source, names, units, tuple(values), range(1, 1 + len(found[0][1])), rate)


def _from_text(source: Source, content: str) -> Columns:
    delimiter, width = _dialect(list(islice(filter(None, _lines(content)), SAMPLE)))
    reader = csv.reader(_lines(content), delimiter=delimiter, skipinitialspace=True)
    rows: Iterator[tuple[int, list[str]]] = ((reader.line_num, row) for row in reader if any(row))
    first = next((row for row in rows if 2 * len(row[1]) > width), None)  # behind remarks of a program
    if first is None:
        raise UnusableFileError(source, "empty", "no rows in it")
    written = [cell.strip() for cell in first[1]]
    if any(cell and as_numbers([cell]) is not None for cell in written):  # no header
        written, rows = [""] * width, chain([first], rows)
    while len(written) > 1 and any(written) and not written[-1]:  # a delimiter at the end
        written.pop()
    names, units = zip(*map(split_unit, written), strict=True)
    parts: list[list[Numbers | list[str]]] = [[] for _ in names]
    lines: list[int] = []
    while block := list(islice(rows, BLOCK)):
        lines += [line for line, _ in block]
        for line, row in block:
            if len(row) > len(names) and any(cell.strip() for cell in row[len(names) :]):
                detail = f"line {line} has {len(row)} cells, expected {len(names)}"
                raise UnusableFileError(source, "rows of different lengths", detail)
        columns = zip_longest(*(row for _, row in block), fillvalue="")
        for part in parts:
            cells = next(columns, ("",) * len(block))
            numbers = as_numbers(cells)
            part.append(list(cells) if numbers is None else numbers)
    return Columns(source, names, units, tuple(map(_joined, parts)), lines)


def _joined(parts: list[Numbers | list[str]]) -> Numbers | list[str]:
    """Join the blocks of a column: text, if one of them is."""
    numbers = [part for part in parts if not isinstance(part, list)]
    if len(numbers) == len(parts):
        return np.concatenate([*numbers, np.empty(0)])
    return [
        cell if isinstance(cell, str) else "" if cell != cell else f"{cell:.15g}"
        for part in parts
        for cell in part
    ]


def as_numbers(cells: Sequence[str]) -> Numbers | None:
    """Convert cells to float64, with decimal points or commas, empty ones to NaN; None if one is text."""
    with suppress(ValueError):
        return np.array(list(map(float, cells)))
    joined = "\n".join(cells)
    if "," in joined and "." not in joined:
        cells = joined.replace(",", ".").split("\n")
    with suppress(ValueError):
        return np.array([np.nan if cell.strip().lower() in EMPTY else float(cell) for cell in cells])
    return None


def _lines(content: str) -> Iterator[str]:
    """Yield the lines of a text, "" for comments and for Excel's first line "sep=;"."""
    start = 0
    while start < len(content):
        end = content.find("\n", start)
        end = len(content) if end < 0 else end
        yield "" if content.startswith(("#", "sep="), start) else content[start:end]
        start = end + 1


def _dialect(lines: list[str]) -> tuple[str, int]:
    """Return the delimiter by which most lines have the same number of cells, and this number."""
    for delimiter in "\t;, ":
        if (
            delimiter == ","
            and lines
            and _DECIMAL_COMMAS.fullmatch(lines[-1])
            and ("," not in lines[0] or " " in lines[-1])
        ):
            continue
        widths = Counter(map(len, csv.reader(lines, delimiter=delimiter, skipinitialspace=True)))
        width, count = max(widths.items(), key=lambda item: item[1], default=(1, 0))
        if width > 1 and 2 * count > len(lines):
            return delimiter, width
    return "\t", 1


def common(found: Mapping[Path, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of columns that most files have. Raises DataError, which names the first file that lacks one."""
    if not found:
        raise DataError("no files, expected one or more")
    counts = Counter(name for names in found.values() for name in dict.fromkeys(names))
    shared = tuple(name for name, count in counts.items() if name and 2 * count > len(found))
    for path, names in found.items():
        if lacking := [name for name in shared if name not in names]:
            raise DataError(
                f"{text(path)}: no numbers named {shortened(lacking)}, as most of the {len(found)} files have"
            )
        if not shared and (any(names) or len(names) != len(next(iter(found.values())))):
            raise DataError(f"{text(path)}: its {len(names)} columns are not those of the other files")
    return shared


def finite(x: Array, where: object) -> NDArray[np.float32]:
    """Return samples [N, ...] as float32. Raises DataError, which begins with `where`, for text or a value that is not finite."""
    if x.dtype.kind not in "biuf":
        raise DataError(f"{where}: {x.dtype} {list(x.shape)}, expected numbers")
    found = x.astype(np.float32, order="C", copy=False)
    for start in range(0, len(found), ROWS):
        wrong = np.argwhere(~np.isfinite(found[start : start + ROWS]))
        if len(wrong):
            place = [int(wrong[0, 0]) + start, *map(int, wrong[0, 1:])]
            raise DataError(f"{where}: {found[tuple(place)]} at {place}, expected finite numbers")
    return found


def moments(x: NDArray[np.float32], rows: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of samples [N, C, ...] at `rows`; 1 for a channel that is constant.

    In float64, block by block, the mean first: a pressure of 101,325 Pa may change by 1.
    """
    blocks = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    axes = (0, *range(2, x.ndim))
    count = max(1, len(rows) * int(np.prod(x.shape[2:])))
    mean = sum((x[block].sum(axes, np.float64) for block in blocks), np.zeros(x.shape[1])) / count
    centre = mean.reshape(-1, *(1 for _ in x.shape[2:]))
    squares = sum((np.square(x[block] - centre).sum(axes) for block in blocks), np.zeros(x.shape[1]))
    std = np.sqrt(squares / count)
    std = np.where(std > 1e-6 * np.abs(mean), std, 1.0)  # what remains is rounding
    # digits of a float32, and not decimals: values may be of microvolts
    return tuple(float(f"{value:.9g}") for value in mean), tuple(float(f"{value:.9g}") for value in std)
