"""Images of two separable classes, and pictures of noise."""

from pathlib import Path

import numpy as np
from PIL import Image

Y = np.arange(12) % 2
_BRIGHT = 150 * Y[:, None, None, None]
X = (np.random.default_rng(3).integers(0, 100, (12, 1, 4, 4)) + _BRIGHT).astype(np.uint8)


def picture(path: Path, value: int = 0) -> None:
    """Writes a picture; another name gives other pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(abs(hash(path.name)) % 1000).integers(0, 256, (4, 4), np.uint8)
    Image.fromarray(pixels + np.uint8(value)).save(path)
