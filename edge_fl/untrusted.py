"""Read what other programs send: whole numbers, and JSON.

`str.isdigit` also accepts digits of other scripts and superscripts, which `int` may not, and `int` fails on more than 4,300 digits.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_making = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it cannot decode: of the wrong form, with text that is not UTF-8, or nested too deeply."""


def whole(text: str, most: int) -> int | None:
    """The number from 0 to `most` that a text of ASCII digits is; None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if number <= most else None


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type. All make it here, one at a time: msgspec looks at a type where it first needs it, and two threads that do so
    at once end the process (SIGSEGV). Afterwards `msgspec.convert` to that type is safe as well.
    """
    found = _decoders.get(kind)
    if found is None:
        with _making:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def converted(tree: object, kind: type[T]) -> T:
    """Convert plain values to a type, as `msgspec.convert` does. Raises msgspec.ValidationError."""
    decoder(kind)
    return msgspec.convert(tree, kind)
