"""Try to read and write the pictures of a device, as the account that runs this: `python3 folder_probe.py FOLDER`.

Prints one line per folder or file that cannot be used. Imports only Python: the account may not read edge-fl's own packages.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 2000
"""Files that are opened; more of one owner and mode would show nothing new."""
MAX_LINES = 20


def problems(root: Path) -> Iterator[str]:
    """What cannot be read or written, with the reason: class folders are tried by a file that is made and removed, and files by opening."""
    opened = 0
    failed: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=failed.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if failed:
            break
        if problem := _write(Path(folder)):
            yield f"{folder}: cannot write ({problem})"
        for name in (name for name in files if not name.startswith(".")):
            file = os.path.join(folder, name)  # noqa: PTH118  # text, for the line
            if opened < MAX_FILES and (problem := _read(Path(file))):
                yield f"{file}: cannot read ({problem})"
            opened += 1
    for error in failed:
        yield f"{error.filename}: cannot read ({error.strerror})"


def _write(folder: Path) -> str:
    """Make, rename and remove a file, as a label does; return the reason of a failure."""
    made = folder / f".edge-fl-{secrets.token_hex(4)}"
    moved = made.with_name(f"{made.name}-moved")
    try:
        made.touch()
        made.rename(moved)
        moved.unlink()
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _read(file: Path) -> str:
    try:
        if file.is_file():  # no FIFO
            file.open("rb").close()
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


if __name__ == "__main__":
    for number, line in enumerate(problems(Path(sys.argv[1]))):
        if number == MAX_LINES:
            break
        sys.stdout.buffer.write(os.fsencode(line.replace("\n", " ")) + b"\n")
