"""Text and bytes of paths: the name of a file is bytes, which need not be UTF-8 and may hold characters that a terminal acts on."""

from __future__ import annotations

import os


def text(path: str | os.PathLike[str]) -> str:
    r"""Return the path as text that any output, log, JSON or message takes: what is not UTF-8 or not printable as \xNN or \uNNNN."""
    name = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in name
    )


def raw(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of the path, for hashes and for comparing: the same for a name that is not UTF-8."""
    return os.fsencode(path)
