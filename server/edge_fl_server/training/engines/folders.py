"""Temporary folders of simulated clients, removed with their owners; those of a killed process by its workers or the next `create`.

A living process holds a lock on a file in its folder, so a folder whose lock is free can be removed.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

PREFIX, UNLOCKED_PREFIX, LOCK = "edge-fl-clients-", "edge-fl-making-", "owner.lock"
SHARED_MEMORY = Path("/dev/shm")

_locks: dict[Path, IO[str]] = {}


def create(parent: Path | None = None) -> Path:
    """Create a folder in `parent` (default: the system's folder for temporary files)."""
    parent = parent or Path(tempfile.gettempdir())
    remove_abandoned(parent)
    unlocked = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX, dir=parent))
    lock = (unlocked / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # renamed when locked: another process must not see it without a lock
    folder = unlocked.rename(parent / unlocked.name.replace(UNLOCKED_PREFIX, PREFIX))
    _locks[folder] = lock
    return folder


def remove_with(owner: object, folder: Path) -> Path:
    """Remove the folder when `owner` is garbage-collected; returns the folder."""
    weakref.finalize(owner, _remove, folder)
    return folder


def remove_abandoned(*parents: Path) -> None:
    """Remove the folders of killed processes in `parents` (default: the folder for temporary files and the shared memory)."""
    for parent in parents or (Path(tempfile.gettempdir()), SHARED_MEMORY):
        for path in parent.glob(f"{PREFIX}*/{LOCK}"):
            with suppress(OSError), path.open() as lock:  # its owner is alive, or it belongs to another user
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_tree(path.parent)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        _remove_tree(folder)
    _locks.pop(folder).close()


def _remove_tree(folder: Path) -> None:
    # renamed first: a worker that still runs cannot add a file
    renamed = folder.rename(folder.with_name(folder.name.replace(PREFIX, UNLOCKED_PREFIX)))
    shutil.rmtree(renamed, ignore_errors=True)
