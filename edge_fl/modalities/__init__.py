"""Kinds of samples: how each is read from files and arrays, shown on a page, and passed to an extractor.

A modality is one module with the functions of `Modality` and a line in ABOUT; nothing else knows what a picture or a recording is. To add
one: its axes in `edge_fl.inputs.KINDS`, its module in MODULES, its words in ABOUT, and a network for it in `edge_fl.models`.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import DataError, brief
from edge_fl.files.folder import unusable
from edge_fl.files.npz import Array
from edge_fl.files.paths import text
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities.limits import FULL_BITS, LIMITS, MB, FileLimits

Source: TypeAlias = Path | BinaryIO
Thumbnails = NDArray[np.uint8]
SIDE = 16
"""Thumbnails have SIDE² levels."""


class About(NamedTuple):
    """Words and files of a kind of samples: what one and many are called, and its files by suffix."""

    sample: str
    samples: str
    files: str
    suffixes: frozenset[str]


ABOUT: dict[Kind, About] = {
    "picture": About(
        "picture",
        "pictures",
        "pictures",
        frozenset(
            ".png .jpg .jpeg .jfif .mpo .webp .bmp .gif .tif .tiff .ppm .pgm .heic .heif .avif".split()
        ),
    ),
    "series": About(
        "window", "windows", "CSV or NPZ recordings", frozenset({".csv", ".tsv", ".txt", ".npz", ".parquet"})
    ),
    "audio": About("clip", "clips", "WAV or FLAC recordings", frozenset({".wav", ".flac"})),
    "table": About("row", "rows", "CSV files", frozenset({".csv", ".tsv", ".txt"})),
}
MODULES: dict[Kind, str] = {"picture": "pictures", "series": "series", "audio": "audio", "table": "tables"}


class UnusableFileError(DataError):
    """A file from which no sample can be read.

    reason: contains nothing of the file, so that reasons can be counted and sent. detail: for this machine. passing: the file itself may
    be good, because memory, permissions or the disk were to blame. path: None inside of `opened`, which knows it.
    """

    def __init__(self, path: Source | None, reason: str, detail: str = "", *, passing: bool = False) -> None:
        self.reason, self.detail, self.passing = reason, detail, passing
        super().__init__(f"{text(path) if isinstance(path, PurePath) else 'file'}: {self.words}")

    @property
    def words(self) -> str:
        """The reason with its detail."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Reading(NamedTuple):
    """Samples [n, ...] of one file, in its order, and remarks on its quality ("channel x is constant").

    A remark has neither the name of the file nor a count, so that files with the same remark can be counted.
    """

    samples: Array
    remarks: tuple[str, ...] = ()


class Modality(Protocol):
    """The functions of a kind of samples; samples are [N, *shape] in the dtype of the input."""

    def arrays(self, x: Array, where: str) -> Array:
        """Return samples from an array as users have them. Raises DataError, which begins with `where`."""

    def fit(self, x: Array, input: InputSpec, where: object) -> Array:
        """Return samples in the shape of `input`. Raises DataError, which begins with `where`."""

    def input_of(self, x: Array, rows: NDArray[np.int64], given: InputSpec | None) -> InputSpec:
        """Return the input of an extractor for samples x, with mean and std of those at `rows`, and all else as `given`."""

    def propose(self, files: Sequence[Path], window_s: float = ..., rate: float = ...) -> InputSpec:
        """Return an input for recordings or rows, of pictures none: a network says it. Raises DataError."""

    def check(self, path: Path, limits: FileLimits = LIMITS) -> None:
        """Read the header of a file. Raises UnusableFileError as `read`, apart from damage behind the header."""

    def read(
        self, path: Source, input: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
    ) -> Reading:
        """Return the samples of a file, fitted to `input`; bits: of 16-bit pictures. Raises UnusableFileError."""

    def synthetic(self, input: InputSpec, count: int, seed: int) -> Array:
        """Return `count` samples that resemble real ones, for calibration without data."""


@contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """Open a file; whatever is raised inside the block becomes a UnusableFileError: a malformed file may cause an exception of any type."""
    try:
        if isinstance(source, Path) and (reason := unusable(source)):
            raise UnusableFileError(source, reason, passing=True)
        with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
            file.seek(0)
            yield file
    except UnusableFileError as error:
        raise UnusableFileError(source, error.reason, error.detail, passing=error.passing) from error
    except EOFError as error:
        raise UnusableFileError(source, "truncated") from error
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            reason = getattr(error, "strerror", None) or "out of memory"
            raise UnusableFileError(source, reason.lower(), passing=True) from error
        raise UnusableFileError(source, "damaged", brief(f"{type(error).__name__}: {error}")) from error


def require_memory(source: Source, needed: float, limits: FileLimits) -> None:
    """Raise UnusableFileError if what a file needs, in bytes, is above the limits."""
    if needed > (allowed := min(limits.decoding_bytes, limits.max_bytes)):
        detail = f"it needs about {needed / MB:.0f} MB, allowed are {allowed / MB:.0f} MB; divide the file"
        raise UnusableFileError(source, "too large for this board", detail)


def require_kind(input: InputSpec, kind: Kind, where: object) -> None:
    """Raise DataError, which begins with `where`, if an extractor takes samples of another kind."""
    if input.kind != kind:
        raise DataError(
            f"{where}: {ABOUT[kind].samples}, but the extractor takes {ABOUT[input.kind].samples} ({input.kind})"
        )


def scaled(x: Array) -> NDArray[np.float32]:
    """Return samples as an extractor takes them: pixels from 0..255 as 0..1, all else as it is."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32, copy=False)


def noise(levels: NDArray[np.uint8], input: InputSpec) -> NDArray[np.float32]:
    """Turn random levels [n, *shape] of 0..255 into an extractor's input with its mean and spread, equal on every machine."""
    if input.kind == "picture":
        return scaled(levels)
    shape = (-1, *(1 for _ in input.shape[1:]))
    mean, std = (np.array(values, np.float32).reshape(shape) for values in (input.mean, input.std))
    return np.asarray(mean + std * ((levels.astype(np.float32) - 127.5) / np.float32(73.9)))


def of(kind: Kind) -> Modality:
    """Return the modality of a kind; its module is imported now, with Pillow for pictures."""
    return cast(Modality, importlib.import_module(f"edge_fl.modalities.{MODULES[kind]}"))


def kind_of(path: PurePath) -> Kind | None:
    """Return the kind of samples of a file by its suffix, a series for a table; None if it is of none."""
    suffix = path.suffix.lower()
    return next((kind for kind, about in ABOUT.items() if suffix in about.suffixes), None)


def kind_of_most(paths: Iterable[PurePath]) -> Kind | None:
    """Return the kind of most of these files, None if they are of none."""
    found = Counter(kind for path in paths if (kind := kind_of(path)))
    return found.most_common(1)[0][0] if found else None


def of_most(paths: Sequence[Path]) -> list[Path]:
    """Return those of these files that are of the kind of most of them."""
    kind = kind_of_most(paths)
    return [path for path in paths if kind and path.suffix.lower() in ABOUT[kind].suffixes]
