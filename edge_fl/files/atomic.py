"""Atomic file writes: after a power cut a file has either its old or its new content.

The content is written to a temporary file in the same folder and flushed to disk; the file is then renamed and the folder flushed.
Temporary files end in `.part`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from edge_fl.errors import RunError
from edge_fl.files.paths import text
from edge_fl.files.shared import adopt, adopt_path


@contextmanager
def writing(path: Path, *, flush: bool = True, private: bool = False) -> Iterator[BinaryIO]:
    """Open a binary file that becomes `path` when the block succeeds and is removed when it raises. Raises OSError.

    Without `flush` a power cut may leave an empty file: for files that are written often and may be lost, to spare an SD card.
    A `private` file has mode 0600 from its creation. Owner, group and mode follow from the folder (edge_fl/files/shared.py).
    """
    part = _part(path)
    try:
        mode = 0o600 if private else 0o666  # set at creation: a later chmod would leave a moment for others
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            adopt(file.fileno(), path.parent, private=private)
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
        if flush:
            flush_to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


def link(source: Path, path: Path) -> None:
    """Hard-link `source` to `path`, flushed to disk; copy it where the file system has no links."""
    part = _part(path)
    try:
        try:
            os.link(source, part)
        except OSError:  # FAT has no links
            shutil.copyfile(source, part)
        adopt_path(part)
        flush_to_disk(part)
        os.replace(part, path)
        flush_to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, content: bytes | str, *, flush: bool = True, private: bool = False) -> None:
    """Write `content` (text as UTF-8) to `path` atomically, see `writing`. Raises OSError and leaves the old file unchanged."""
    with writing(path, flush=flush, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def save(path: Path, content: bytes | str, consequence: str) -> Path:
    """Write a result, also into a new folder, and return its path. Raises RunError with this `consequence` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, content)
    except OSError as error:
        raise RunError(f"{text(path)}: cannot be written ({error.strerror})", consequence) from error
    return path


def _part(path: Path) -> Path:
    """Return a temporary file in the folder of `path`; its name is no longer than a file system allows."""
    return path.with_name(f".{path.name[:60]}.{secrets.token_hex(4)}.part")


def flush_to_disk(path: Path) -> None:
    """Flush a file or the entries of a folder to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
