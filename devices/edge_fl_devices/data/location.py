"""Where a device's data are, and whether they have changed: all that the agent itself needs to know; its children read them."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from edge_fl.errors import DataError, nearest
from edge_fl.files.folder import walk
from edge_fl.files.paths import raw

KINDS = ("folder", "npz", "python")


def parsed(source: str) -> tuple[str, str]:
    """Return kind and location of a source. Raises DataError."""
    kind, _, location = source.partition(":")
    if location and kind in KINDS:
        return kind, location
    if source.endswith(".npz") or Path(source).is_dir():
        return "npz" if source.endswith(".npz") else "folder", source
    raise DataError(
        f"data source {source!r}: expected a folder, an .npz, or KIND:LOCATION{nearest(kind, KINDS)}"
    )


def stamp(source: str) -> str:
    """Return a value that changes when a folder or an .npz may have changed; "" for a function. Raises DataError."""
    kind, location = parsed(source)
    if kind == "python":
        return ""
    root, total = Path(location), hashlib.blake2b(digest_size=16)
    for path in [root] if kind == "npz" else walk(root).files:
        with suppress(OSError):
            stat = path.stat()
            total.update(raw(path) + b"\0%d %d\n" % (stat.st_size, stat.st_mtime_ns))
    return total.hexdigest()
