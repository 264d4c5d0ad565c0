"""Disk failures as ArtefactError with the failure word that a device reports."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.files.paths import text
from edge_fl.files.shared import make_folder, open_private

LOCK = ".lock"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def reporting(where: str) -> Iterator[None]:
    """Convert an OSError of the block to ArtefactError; `why` is "enospc" for a full disk and "disk" for any other failure."""
    try:
        yield
    except OSError as error:
        why = Failure.ENOSPC if error.errno in FULL else Failure.DISK
        raise ArtefactError(
            f"{where}: {why}, {error.strerror or error}", why, consequence="what was there stays"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a private folder, which is made if it is missing, for a change that only one process makes at a time.

    A failing disk raises ArtefactError, as in `reporting`.
    """
    with reporting(text(folder)):
        make_folder(folder, 0o700)
        with os.fdopen(open_private(folder / LOCK, os.O_WRONLY), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise ArtefactError ("enospc") unless `folder`'s disk has `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ArtefactError(
            f"{what}: enospc, {needed_bytes} bytes needed below {text(folder)}, {free_bytes} free",
            Failure.ENOSPC,
            consequence="what was there stays",
        )
