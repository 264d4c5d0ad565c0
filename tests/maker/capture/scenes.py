"""Pictures of random blocks: different numbers give pictures that are no near duplicates."""

from io import BytesIO

import numpy as np
from PIL import Image

CELLS, CELL = (8, 9), 8


def pixels(number: int) -> np.ndarray:
    """Grey pixels [64, 72]."""
    cells = np.random.default_rng(number).integers(40, 200, CELLS, dtype=np.uint8)
    return np.kron(cells, np.ones((CELL, CELL), np.uint8))


def encoded(grey: np.ndarray, format: str = "PNG") -> bytes:
    buffer = BytesIO()
    Image.fromarray(grey).save(buffer, format)
    return buffer.getvalue()


def scene(number: int, format: str = "PNG") -> bytes:
    """A picture file."""
    return encoded(pixels(number), format)
