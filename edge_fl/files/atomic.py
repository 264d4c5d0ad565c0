"""Files that are either the old one or the new one, whole, whatever happens in between: a power cut leaves no half-written file.

The new content goes to a temporary file in the same folder, is flushed to the disk, takes the old one's name in one step, and the
folder is flushed too. Leftovers of a cut end in `.part`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: Path, *, flush: bool = True, private: bool = False) -> Iterator[BinaryIO]:
    """A binary file to stream into; it becomes `path` when the block ends well and vanishes when it raises. Raises OSError.

    Without `flush` a power cut may leave an empty file: for what is written often and may be lost, so that a card lasts longer.
    A `private` file can be read by its owner alone, from the first byte on.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        mode = 0o600 if private else 0o666  # at its creation: later would leave a moment for others
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
        if flush:
            _flush_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def link(source: Path, path: Path) -> None:
    """Puts the file `source` at `path` as well, flushed to the disk: the same bytes, not a copy where the file system can share them."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        try:
            os.link(source, part)
        except OSError:  # FAT has no links
            shutil.copyfile(source, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
        _flush_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, content: bytes | str, *, flush: bool = True, private: bool = False) -> None:
    """Puts `content` (text as UTF-8) at `path`, as `writing` does. Raises OSError; the old file then stands as it was."""
    with writing(path, flush=flush, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
