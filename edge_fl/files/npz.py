"""Arrays in one .npz file: written atomically, read without pickle; every kind of damage is a DataError."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import DataError
from edge_fl.files import atomic
from edge_fl.files.paths import text

Array = NDArray[Any]
MAX_FILE_BYTES = 8 * 2**30
SMALL_BYTES = 2**20  # an array that always fits into memory
_BROKEN = (
    OSError,
    ValueError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def read(path: Path, only: Sequence[str] = ()) -> dict[str, Array]:
    """Read all arrays, or `only` those of these names that are there.

    Raises DataError for a file that is missing, above 8 GiB, not an .npz, damaged, or contains Python objects; MemoryError for arrays that
    do not fit into memory.
    """
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise DataError(f"{text(path)}: {size} bytes, at most {MAX_FILE_BYTES}")
        if not zipfile.is_zipfile(path):  # np.load would read it as a pickle and explain how to allow that
            raise DataError(f"{text(path)}: not a readable .npz (another kind of file, or cut short)")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            # np.load leaks a file that it cannot read
            return {name: archive[name] for name in archive.files if not only or name in only}
    except MemoryError as error:
        with zipfile.ZipFile(path) as archive:
            largest = max(entry.file_size for entry in archive.infolist())
        if largest < SMALL_BYTES:  # the header of an array announces more than the file contains
            raise DataError(f"{text(path)}: not a readable .npz (damaged: {_first_line(error)})") from error
        raise MemoryError(f"{text(path)}: {_first_line(error)}") from error
    except FileNotFoundError as error:
        raise DataError(f"{text(path)}: no such file; expected an .npz") from error
    except (*_BROKEN, AttributeError, TypeError) as error:
        # AttributeError, TypeError: a lone .npy is an array, not an archive
        raise DataError(f"{text(path)}: not a readable .npz ({_first_line(error)})") from error


def write(path: Path, arrays: Mapping[str, Array], *, compress: bool = True) -> None:
    """Write the file atomically. Raises DataError for Python objects or when it cannot be written."""
    if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:
        raise DataError(
            f"{text(path)}: {', '.join(objects)} would contain Python objects, expected numbers or text"
        )
    try:
        with atomic.writing(path) as file:
            save: Callable[..., None] = np.savez_compressed if compress else np.savez
            save(file, **arrays)
    except OSError as error:
        raise DataError(f"{text(path)}: cannot be written ({error.strerror})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
