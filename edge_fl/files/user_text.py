"""Read text files that people write, on any system: UTF-8 with or without a byte order mark, UTF-16 with one, and any line ends."""

from __future__ import annotations

import codecs
from pathlib import Path

REMEDY = "save the file as UTF-8"
UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
UTF32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


class EncodingError(ValueError):
    """Bytes that are no text; the message says where and what to do, and quotes nothing of the content."""


def read(path: Path) -> str:
    r"""Return the text of a file with \n as its line ends. Raises OSError, EncodingError."""
    return decode(path.read_bytes())


def decode(content: bytes) -> str:
    r"""Return the text of a file's content with \n as its line ends. Raises EncodingError."""
    return _decoded(content).replace("\r\n", "\n").replace("\r", "\n")


def _decoded(content: bytes) -> str:
    if content.startswith(UTF32):  # the mark of UTF-32 begins with that of UTF-16
        raise EncodingError(f"is UTF-32: {REMEDY}")
    if encoding := UTF16.get(content[:2]):
        try:
            return content[2:].decode(encoding)
        except UnicodeDecodeError as error:
            raise EncodingError(f"is UTF-16 and damaged at byte {error.start + 2}: {REMEDY}") from error
    content = content.removeprefix(codecs.BOM_UTF8)
    if b"\0" in content[:4]:
        raise EncodingError(f"is UTF-16 without a byte order mark, or no text: {REMEDY}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise EncodingError(f"line {line}, column {column} is not UTF-8: {REMEDY}") from None
