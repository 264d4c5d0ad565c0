"""Temporary folders of simulated clients. Each is removed with its owner or, if the process was killed, by the next `create`.

A living process holds a lock on a file in its folder, so a folder whose lock is free can be removed.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

PREFIX, UNLOCKED_PREFIX, LOCK = "edge-fl-clients-", "edge-fl-making-", "owner.lock"

_locks: dict[Path, IO[str]] = {}


def create(parent: Path | None = None) -> Path:
    """Create a folder in `parent` (default: the system's folder for temporary files)."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
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


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _locks.pop(folder).close()


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of killed processes."""
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # its owner is alive, or it belongs to another user
            continue
