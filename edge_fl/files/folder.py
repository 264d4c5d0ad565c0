"""List the regular files below a folder; everything else in it is returned with the reason why it cannot be used."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

UNREADABLE = "unreadable"
NOT_REGULAR = "not a regular file"


@dataclass(frozen=True)
class Listing:
    """`files` and `skipped` (with reasons) are sorted; `folders` are the names directly below the root, without hidden ones."""

    files: list[Path] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def walk(root: Path) -> Listing:
    """List the files below `root`, without hidden files and folders. Opens no file, so that a FIFO or a device cannot block."""
    listing = Listing()

    def on_error(error: OSError) -> None:
        listing.skipped.append((Path(error.filename), "unreadable folder"))

    for parent, folders, names in os.walk(root, onerror=on_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if Path(parent) == root:
            listing.folders.extend(sorted(folders))
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            if reason := unusable(path):
                listing.skipped.append((path, reason))
            else:
                listing.files.append(path)
    listing.files.sort()
    listing.skipped.sort()
    return listing


def unusable(path: Path) -> str:
    """Return why a file must not be opened: a FIFO, a socket, a device, a broken link; "" for a regular file."""
    try:
        return "" if stat.S_ISREG(path.stat().st_mode) else NOT_REGULAR
    except OSError:
        return UNREADABLE
