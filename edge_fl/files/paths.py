"""Text and bytes of paths: the name of a file is bytes, which need not be UTF-8 and may hold characters that a terminal acts on.

Python gives such bytes as lone surrogates, which no output, JSON or message takes. `os.fspath` gives a path to the system unchanged.
"""

from __future__ import annotations

import os
import unicodedata

from edge_fl.errors import encodable

JOINERS = "\u200c\u200d"  # part of words in Persian and Hindi, and of emoji


def text(path: str | os.PathLike[str]) -> str:
    r"""Return the path as text that any output, log, JSON or message takes: what is not UTF-8 or not printable as \xNN or \uNNNN."""
    return printable(encodable(os.fspath(path)))


def raw(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of the path, for hashes and for comparing: the same for a name that is not UTF-8."""
    return os.fsencode(path)


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC), to be compared: a Mac writes the ü of a file's name as two characters."""
    return unicodedata.normalize("NFC", name)


def is_utf8(path: str | os.PathLike[str]) -> bool:
    """Whether the path is text, which settings, messages and class names can hold."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeError:
        return False
    return True


def printable(text: str) -> str:
    r"""Return a text with \xNN or \uNNNN instead of characters that are not printable, such as a line break."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in JOINERS else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
