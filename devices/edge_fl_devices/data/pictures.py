"""Decode a picture file with Pillow, within limits: upright, in the channels and size of the extractor's input."""

from __future__ import annotations

import importlib
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl_devices.data.files import UNREADABLE, unusable

SUFFIXES = frozenset(".png .jpg .jpeg .jfif .mpo .webp .bmp .gif .tif .tiff .ppm .pgm .heic .heif".split())
HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
HEIC_ADVICE = "HEIC needs pip install 'edge-fl[heic]'"
FLOAT_ADVICE = "floating-point pixels outside 0..1: store them as 8 or 16 bits"
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


class PictureError(DataError):
    """A file that cannot be used as a picture; `reason` does not contain its name, so that reasons can be counted."""

    def __init__(self, path: Path | BinaryIO, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


def check(path: Path, limits: PictureLimits = LIMITS) -> None:
    """Read the header of a picture file, not its pixels. Raises PictureError as `decode`, apart from damage behind the header."""
    with _opened(path, limits):
        pass


def decode(
    path: Path | BinaryIO, expected: InputSpec | None, limits: PictureLimits = LIMITS
) -> NDArray[np.uint8]:
    """Return the picture as uint8 [C, H, W].

    Without `expected` it keeps its size and is grey or RGB as stored. Raises PictureError when it is damaged, too large, or not a
    picture.
    """
    if expected and expected.channels not in _MODES:
        raise DataError(f"{path}: a picture has 1 or 3 channels, the extractor takes {expected.channels}")
    with _opened(path, limits) as file:
        if expected:  # JPEG is decoded at 1/2 to 1/8 of its size, but at least twice the expected one
            size = 2 * max(expected.height, expected.width)
            file.draft(None, (size, size))
        picture = ImageOps.exif_transpose(file)
        if picture.mode.startswith("I"):  # 16 bits; Pillow's conversion would clip them
            picture = Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))
        elif picture.mode == "F":  # Pillow's conversion would round 0..1 to black
            picture = Image.fromarray(_scaled(np.asarray(picture), path))
        mode = _MODES[expected.channels] if expected else "L" if picture.mode in ("1", "L", "LA") else "RGB"
        picture = picture.convert(mode)
    if expected and (picture.height, picture.width) != (expected.height, expected.width):
        picture = picture.resize((expected.width, expected.height), Image.Resampling.LANCZOS)
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


@contextmanager
def _opened(path: Path | BinaryIO, limits: PictureLimits) -> Iterator[Image.Image]:
    """Open a picture within the limits; errors of the decoder inside the block become PictureError."""
    if isinstance(path, Path):
        if reason := unusable(path):
            raise PictureError(path, reason)
        try:
            with path.open("rb") as file, _opened(file, limits) as picture:
                yield picture
        except PictureError as error:
            raise PictureError(path, error.reason) from error
        except OSError as error:
            raise PictureError(path, UNREADABLE) from error
        return
    try:
        start = path.read(12)
        path.seek(0)
        if start[4:8] == b"ftyp" and start[8:] in HEIC_BRANDS and not _register_heic():
            raise PictureError(path, HEIC_ADVICE)
        with warnings.catch_warnings(), Image.open(path) as picture:
            warnings.simplefilter("ignore")  # about palettes and metadata; errors are raised
            if picture.width * picture.height > limits.max_pixels:
                raise PictureError(path, UNREADABLE)
            yield picture
    except PictureError:
        raise
    except _BROKEN as error:
        raise PictureError(path, UNREADABLE) from error


def _register_heic() -> bool:
    """Let Pillow read HEIC; False if pillow-heif is not installed."""
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError:
        return False
    return True


def _scaled(pixels: NDArray[np.float32], path: Path | BinaryIO) -> NDArray[np.uint8]:
    """Convert 0..1 to 0..255."""
    if not ((pixels >= 0) & (pixels <= 1)).all():  # also rejects NaN
        raise PictureError(path, FLOAT_ADVICE)
    return np.rint(255 * pixels).astype(np.uint8)
