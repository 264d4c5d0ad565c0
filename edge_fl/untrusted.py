"""Read what other programs send: whole numbers, and JSON.

`str.isdigit` also accepts digits of other scripts and superscripts, which `int` may not, and `int` fails on more than 4,300 digits.
"""

from __future__ import annotations

import msgspec

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it cannot decode: of the wrong form, with text that is not UTF-8, or nested too deeply."""


def whole(text: str, most: int) -> int | None:
    """The number from 0 to `most` that a text of ASCII digits is; None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if number <= most else None
