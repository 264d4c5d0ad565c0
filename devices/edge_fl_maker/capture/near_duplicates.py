"""Near duplicates by a difference hash: whether brightness rises from left to right, in each cell of a coarse grid.

The package ImageHash computes the same hash, but depends on SciPy and PyWavelets.
"""

from collections.abc import Iterable
from io import BytesIO

import numpy as np

from edge_fl.data import pictures
from edge_fl.inputs import InputSpec

SIDE = 8
MAX_DIFFERENT_BITS = 1
GRID = InputSpec((1, SIDE, SIDE + 1), resize="stretch")


def difference_hash(picture: bytes) -> str:
    """Return the hash of a picture file, 64 bits as hexadecimal digits. Raises PictureError if it cannot be decoded."""
    bits, _ = pictures.bits_used(BytesIO(picture))  # which of two levels is higher does not depend on them
    grey = pictures.decode(BytesIO(picture), GRID, bits=max(8, bits) if bits else 0)[0].astype(np.int16)
    return np.packbits(np.diff(grey, axis=1) > 0).tobytes().hex()


def is_near_duplicate(hash: str, known: Iterable[int]) -> bool:
    """Whether at most MAX_DIFFERENT_BITS bits differ from one of the `known` hashes, which are numbers."""
    bits = int(hash, 16)
    return any((bits ^ each).bit_count() <= MAX_DIFFERENT_BITS for each in known)
