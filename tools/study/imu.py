"""Exercises by a watch: 10 persons, 7 exercises, both arms, 6 channels at 50 Hz, from the user's own copy of seglearn's watch data.

python -m tools.study.imu convert watch_dataset.npy --out DIR    DIR/csv/personNN/CLASS/{left,right}.csv and DIR/data/watch.npz

The file `seglearn/data/watch_dataset.npy` is in seglearn's wheel (BSD; D. Burns et al., arXiv:1802.01489). It is a pickled array, of which
only numbers and lists are read: any other object in it is an error, and its sha256 is checked first.
"""

import argparse
import codecs
import hashlib
import io
import pickle  # noqa: TID251 - restricted to what makes arrays
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edge_fl.data.samples import Array
from edge_fl.errors import DataError
from edge_fl.files import npz
from edge_fl.inputs import InputSpec

SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
RATE, WINDOW, HOP = 50.0, 200, 100
NAMES, UNITS = ("ax", "ay", "az", "gx", "gy", "gz"), ("g", "g", "g", "rad/s", "rad/s", "rad/s")
SIDES = ("left", "right")


class Recording(NamedTuple):
    """One exercise of one person with the watch on one arm: values float32 [T, 6]."""

    person: str
    exercise: str
    side: str
    values: Array


class _Restricted(pickle.Unpickler):
    """Makes arrays and nothing else."""

    MAKERS = {  # noqa: RUF012 - of names in the file
        ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if made := self.MAKERS.get((module, name)):
            return made
        raise DataError(
            f"watch data: an object {module}.{name} in it, expected arrays only; nothing was read"
        )


def recordings(path: Path) -> list[Recording]:
    """Read the file, ordered by person, exercise and arm. Raises DataError for any other file."""
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise DataError(f"{path}: sha256 {found[:8]}..., expected {SHA256[:8]}... of seglearn 1.2.5")
    file = io.BytesIO(content)
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    data = _Restricted(file).load().item()
    rows = zip(data["subject"], data["y"], data["side"], data["X"], strict=True)
    names = data["y_labels"]
    return sorted(
        (
            Recording(f"person{int(who):02d}", names[int(y)], SIDES[int(side)], x.astype(np.float32))
            for who, y, side, x in rows
        ),
        key=lambda each: each[:3],
    )


def windows(found: Sequence[Recording]) -> dict[str, Array]:
    """Cut the recordings into windows of 4 s, one every 2 s: the arrays of a dataset file."""
    classes = sorted({each.exercise for each in found})
    starts = [range(0, len(each.values) - WINDOW + 1, HOP) for each in found]
    counts = [len(each) for each in starts]
    x = [
        each.values[start : start + WINDOW].T
        for each, begins in zip(found, starts, strict=True)
        for start in begins
    ]
    y = [classes.index(each.exercise) for each in found]
    spec = InputSpec(
        (6, WINDOW), (0.0,) * 6, (1.0,) * 6, "CT", "float32", rate=RATE, hop=HOP, names=NAMES, units=UNITS
    )
    return {
        "x": np.stack(x),
        "y": np.repeat(np.array(y, np.int64), counts),
        "groups": np.repeat(["/".join(each[:3]) for each in found], counts),
        "domains": np.repeat([each.person for each in found], counts),
        "classes": np.array(classes),
        "input": np.array(msgspec.json.encode(spec).decode()),
    }


def convert(path: Path, out: Path) -> None:
    """Write the CSV files and the dataset."""
    found = recordings(path)
    for each in found:
        folder = out / "csv" / each.person / each.exercise
        folder.mkdir(parents=True, exist_ok=True)
        lines = [",".join(("time", *NAMES))]
        lines += [
            ",".join([f"{number / RATE:.2f}", *(f"{value:.6g}" for value in row)])
            for number, row in enumerate(each.values)
        ]
        (folder / f"{each.side}.csv").write_text("\n".join([*lines, ""]))
    (out / "data").mkdir(parents=True, exist_ok=True)
    npz.write(out / "data" / "watch.npz", windows(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(
        "python -m tools.study.imu", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True, dest="part")
    part = parts.add_parser("convert")
    part.add_argument("file", type=Path)
    part.add_argument("--out", type=Path, default=Path("imu"))
    options = parser.parse_args(arguments)
    convert(options.file, options.out)


if __name__ == "__main__":
    main()
