"""Persistent storage of a device: state and heads, downloaded chunks, and the two release slots.

Here is the one place that tells a file that is missing from one that this account may not read.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from edge_fl.errors import InputError
from edge_fl.files import paths

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
    with suppress(OSError, msgspec.DecodeError), allowed(path):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def listed(folder: Path, suffix: str = "") -> list[Path]:
    """What lies in a folder, with this suffix, ascending; empty without the folder. Raises InputError if this account may not list it."""
    with suppress(FileNotFoundError), allowed(folder):
        return sorted(path for path in folder.iterdir() if path.name.endswith(suffix))
    return []


def not_allowed(path: Path, do: str = "read") -> str:
    """Which account may not do what, and which one may: the owner of the nearest place that this account can see."""
    owner = ""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            owner = _name(place.stat().st_uid)
            break
    return (
        f"{paths.text(path)}: the account {_name(os.geteuid())} may not {do} it; expected the account"
        f" {owner}: put 'sudo -u {owner}' before the command"
    )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
