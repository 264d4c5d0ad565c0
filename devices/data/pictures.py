"""Decode a picture file with Pillow, within limits: upright, in the channels and size of the extractor's input."""

from __future__ import annotations

import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from edge_fl.config import InputSpec
from edge_fl.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_MODES = {1: "L", 3: "RGB"}
_BROKEN = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class PictureLimits:
    """`max_pixels` applies to one picture as stored, `max_bytes` to all pictures together as arrays."""

    max_images: int = 100_000
    max_pixels: int = 64_000_000
    max_bytes: int = 2 * 1024**3


LIMITS = PictureLimits()


def decode(
    path: Path | BinaryIO,
    expected: InputSpec | None,
    *,
    resize: bool = True,
    limits: PictureLimits = LIMITS,
) -> NDArray[np.uint8] | None:
    """Return the picture as uint8 [C, H, W], or None when it is damaged, too large, or not a picture.

    Without `expected` it keeps its size and is grey or RGB as stored. Raises DataError for another size when `resize` is off.
    """
    if expected and expected.channels not in _MODES:
        raise DataError(f"{path}: a picture has 1 or 3 channels, the extractor takes {expected.channels}")
    try:
        with warnings.catch_warnings(), Image.open(path) as file:
            warnings.simplefilter("ignore")  # about palettes and metadata; errors are raised
            if file.width * file.height > limits.max_pixels:
                return None
            picture = ImageOps.exif_transpose(file)
            if picture.mode.startswith("I"):  # 16 bits; Pillow's conversion would clip them
                picture = Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))
            mode = (
                _MODES[expected.channels] if expected else "L" if picture.mode in ("1", "L", "LA") else "RGB"
            )
            picture = picture.convert(mode)
    except _BROKEN:
        return None
    if expected and (picture.height, picture.width) != (expected.height, expected.width):
        if not resize:
            raise DataError(
                f"{path}: {picture.width}x{picture.height} pixels, the extractor takes {expected.width}x{expected.height};"
                " allow resizing, or store them so"
            )
        picture = picture.resize((expected.width, expected.height), Image.Resampling.LANCZOS)
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
