"""Persistent storage of a device: state and heads, downloaded chunks, and the two release slots.

Here is the one place that tells a file that is missing from one that this account may not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from edge_fl.errors import InputError
from edge_fl.files import atomic
from edge_fl.files.accounts import not_allowed
from edge_fl.untrusted import NOT_JSON, decoder

T = TypeVar("T")


@contextmanager
def allowed(path: Path) -> Iterator[None]:
    """Read `path` in the block. Raises InputError if this account may not."""
    try:
        yield
    except PermissionError as error:
        raise InputError(not_allowed(path)) from error


def read_json(path: Path, kind: type[T]) -> T | None:
    """Read a JSON file; None if it is missing or damaged. Raises InputError if this account may not read it."""
    with suppress(OSError, *NOT_JSON), allowed(path):
        return decoder(kind).decode(path.read_bytes())
    return None


def write_json(path: Path, content: object, *, flush: bool = True, private: bool = False) -> None:
    """Replace a JSON file, as `edge_fl.files.atomic.write`. Raises OSError, also without its folder."""
    atomic.write(path, msgspec.json.encode(content), flush=flush, private=private)


def listed(folder: Path, suffix: str = "") -> list[Path]:
    """What lies in a folder, with this suffix, ascending; empty without the folder. Raises InputError if this account may not list it."""
    with suppress(FileNotFoundError), allowed(folder):
        return sorted(path for path in folder.iterdir() if path.name.endswith(suffix))
    return []
