"""How many bits 16-bit pictures use: cameras store 10, 12 or 14 bits in files of 16, and all pictures of a folder alike.

The range is that of the folder, never of one picture: else a dark picture would become a bright one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from edge_fl.data import pictures
from edge_fl.data.limits import FULL_BITS, LIMITS, Depth, PictureLimits

RANGES = (8, 10, 12, 14, FULL_BITS)
SUFFIXES = frozenset({".png", ".tif", ".tiff", ".pgm", ".ppm"})
HEADERS, DECODED = 64, 16
"""Files of a folder whose headers are read, and 16-bit pictures among them that are decoded."""


Used = tuple[int, bool]
"""Bits that one picture uses, 0 if it has no more than 8, and whether it has colours."""


def inspect(
    files: Sequence[Path],
    limits: PictureLimits = LIMITS,
    known: Callable[[Path], Used | None] = lambda path: None,
    marked: Callable[[Path], AbstractContextManager[None]] = lambda path: nullcontext(),
) -> Depth:
    """Return the smallest of RANGES that holds a sample of the 16-bit pictures among `files`, always the same of the same files.

    `known` returns what is known of a file, which is not opened then. A file is opened inside `marked`.
    """
    sample = _evenly([path for path in files if path.suffix.lower() in SUFFIXES], HEADERS)
    wide = []
    for path in sample:
        with suppress(pictures.PictureError), marked(path):  # a skip, with its reason, once it is read
            found = known(path)
            if pictures.is_wide(path, limits) if found is None else found[0]:
                wide.append(path)
    used, colour = 0, False
    for path in _evenly(wide, DECODED):
        with suppress(pictures.PictureError), marked(path):
            bits, has_colour = known(path) or pictures.bits_used(path, limits)
            used, colour = max(used, bits), colour or has_colour
    return Depth(next(most for most in RANGES if used <= most) if wide else 0, colour)


def _evenly(files: Sequence[Path], most: int) -> Sequence[Path]:
    """At most `most` of the files, evenly spaced."""
    return [files[number * len(files) // most] for number in range(most)] if len(files) > most else files
