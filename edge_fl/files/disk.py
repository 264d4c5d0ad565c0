"""Disk failures as ArtefactError with the failure word that a device reports."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.files.paths import text

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


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise ArtefactError ("enospc") unless `folder`'s disk has `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ArtefactError(
            f"{what}: enospc, {needed_bytes} bytes needed below {text(folder)}, {free_bytes} free",
            Failure.ENOSPC,
            consequence="what was there stays",
        )
