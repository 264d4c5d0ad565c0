"""A split over clients as a CSV file, with one line per sample:

    sample,client,set
    0,c003,train
    1,c000,test
    2,,unused

`sample` is the position in the dataset: where a file has training and test images, those for training come first, then those for testing.
Every sample occurs once. The sets are train, validation, test, and unused for samples that are left out.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from edge_fl.data.samples import Indices
from edge_fl.errors import DataError, nearest
from edge_fl.files import atomic, user_text
from edge_fl.files.paths import text
from edge_fl.files.user_text import EncodingError
from edge_fl.untrusted import whole

COLUMNS = ("sample", "client", "set")
SETS = ("train", "validation", "test")
UNUSED = "unused"
MAX_SAMPLE = 10**15
CLIENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Rows = Mapping[str, Mapping[str, Indices]]
"""Client, ascending -> set -> ascending samples."""


def read(path: Path, dataset: str, samples: int) -> Rows:
    """Read the split of a dataset of `samples` samples. Raises DataError, which names the line, for anything but a whole split."""
    rows: dict[str, dict[str, list[int]]] = {}
    seen: dict[int, int] = {}
    for line, (sample, client, part) in _lines(path):
        where = f"{text(path)} line {line}"
        if (number := whole(sample, MAX_SAMPLE)) is None:
            raise DataError(f"{where}: sample {sample[:100]!r}, expected a whole number")
        if number >= samples:
            raise DataError(f"{where}: sample {number}, but {dataset} has the samples 0..{samples - 1}")
        if first := seen.get(number):
            raise DataError(f"{where}: sample {number} again, after line {first}; expected every sample once")
        seen[number] = line
        if part == UNUSED:
            continue
        if part not in SETS:
            raise DataError(f"{where}: set {part!r} is unknown{nearest(part, [*SETS, UNUSED])}")
        if not CLIENT.fullmatch(client):
            raise DataError(
                f"{where}: client {client!r}, expected 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'"
            )
        rows.setdefault(client, {part: [] for part in SETS})[part].append(number)
    if missing := samples - len(seen):
        first = next(number for number in range(samples) if number not in seen)
        raise DataError(
            f"{text(path)}: {missing} of the {samples} samples of {dataset} are missing, the first is {first};"
            f" expected every sample, with the set {UNUSED!r} if it is left out"
        )
    for client in sorted(rows):
        for part in ("train", "test"):
            if not rows[client][part]:
                raise DataError(
                    f"{text(path)}: client {client} has no sample in the set {part!r}, expected 1 or more"
                )
    if not rows:
        raise DataError(f"{text(path)}: no client, expected lines with a client")
    return {
        client: {part: np.sort(np.array(rows[client][part], np.int64)) for part in SETS}
        for client in sorted(rows)
    }


def write(path: Path, samples: int, clients: Sequence[str], sets: Mapping[str, Sequence[Indices]]) -> None:
    """Write a split: `sets` maps each set to one index array per client. Raises DataError if the file cannot be written."""
    owner = np.full(samples, -1)
    kind = np.full(samples, UNUSED, dtype=object)
    for part, rows in sets.items():
        for place, row in enumerate(rows):
            owner[row], kind[row] = place, part
    names = [*clients, ""]  # -1: no client
    lines = [f"{number},{names[owner[number]]},{kind[number]}" for number in range(samples)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, "\n".join([",".join(COLUMNS), *lines, ""]))
    except OSError as error:
        raise DataError(f"{text(path)}: cannot be written ({error.strerror})") from error


def _lines(path: Path) -> list[tuple[int, tuple[str, str, str]]]:
    expected = f"expected a CSV file with the columns {', '.join(COLUMNS)}"
    try:
        reader = csv.reader(io.StringIO(user_text.read(path)))
        header = [name.strip() for name in next(reader, [])]
        if sorted(header) != sorted(COLUMNS):
            raise DataError(f"{text(path)}: columns {', '.join(header) or 'none'}; {expected}")
        places = [header.index(name) for name in COLUMNS]
        lines = []
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(COLUMNS):
                raise DataError(
                    f"{text(path)} line {reader.line_num}: {len(fields)} fields, expected {len(COLUMNS)}"
                )
            sample, client, part = (fields[place].strip() for place in places)
            lines.append((reader.line_num, (sample, client, part)))
        return lines
    except OSError as error:
        raise DataError(f"{text(path)}: cannot be read ({error.strerror}); {expected}") from error
    except (EncodingError, csv.Error) as error:
        raise DataError(f"{text(path)}: not a CSV file ({error}); {expected}") from error
