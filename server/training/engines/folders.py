"""Folders for what clients that are simulated here leave on disk: each goes with its owner or, if that was killed, when the next is made.

Whoever lives holds a lock on a file in its folder, so a folder whose lock can be had belongs to nobody.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

PREFIX, MAKING, LOCK = "edge-fl-clients-", "edge-fl-making-", "owner.lock"

_locks: dict[Path, IO[str]] = {}


def make(parent: Path | None = None) -> Path:
    """A new folder in `parent`, by default where temporary ones are; `until_gone` says for how long."""
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    making = Path(tempfile.mkdtemp(prefix=MAKING, dir=parent))
    lock = (making / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    made = making.rename(parent / making.name.replace(MAKING, PREFIX))  # nobody sees it before it is locked
    _locks[made] = lock
    return made


def until_gone(owner: object, folder: Path) -> Path:
    """The folder, which goes when `owner` does."""
    weakref.finalize(owner, _remove, folder)
    return folder


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _locks.pop(folder).close()


def _sweep(parent: Path) -> None:
    """Removes what processes left behind that were killed."""
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # its owner lives, or it is somebody else's
            continue
