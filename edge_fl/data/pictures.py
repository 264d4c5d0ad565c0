"""Pictures as arrays: decode a file with Pillow within limits, and fit pictures to an extractor's input by its resize policy.

Training, export and devices share this module. Memory: one decoded picture (Pillow stores RGB as 4 bytes per pixel: 48 MB for 12
megapixels) and strips of it. A large JPEG is decoded at a fraction of its size, so it takes less.
"""

from __future__ import annotations

import importlib
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_fl.data.limits import LIMITS, PictureLimits
from edge_fl.errors import DataError
from edge_fl.files.folder import UNREADABLE, unusable
from edge_fl.inputs import InputSpec, Resize

SUFFIXES = frozenset(".png .jpg .jpeg .jfif .mpo .webp .bmp .gif .tif .tiff .ppm .pgm .heic .heif".split())
HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
HEIC_ADVICE = "HEIC needs pip install 'edge-fl[heic]'"
FLOAT_ADVICE = "floating-point pixels outside 0..1: store them as 8 or 16 bits"
STRIP_PIXELS = 2**20
KEPT_DETAIL = (
    2  # large pictures are first averaged over blocks of pixels, down to this multiple of the final size
)
ORIENTATION = 0x0112  # EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDES_SWAPPED = {_UPRIGHT[number] for number in (5, 6, 7, 8)}
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

Pixels = NDArray[np.uint8]
Size = tuple[int, int]  # width, height, as in Pillow


class PictureError(DataError):
    """A file that cannot be used as a picture; `reason` does not contain its name, so that reasons can be counted."""

    def __init__(self, path: Path | BinaryIO, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


def require_pictures(input: InputSpec, where: object) -> None:
    """Raise DataError, which begins with `where`, unless the extractor's input is a picture."""
    if not input.is_picture:
        raise DataError(
            f"{where}: the extractor takes {input.dtype} {list(input.shape)} with axes {input.axes}; expected pictures, uint8 CHW"
        )


def check(path: Path, limits: PictureLimits = LIMITS) -> None:
    """Read the header of a picture file, not its pixels. Raises PictureError as `decode`, apart from damage behind the header."""
    with _opened(path, limits):
        pass


def decode(path: Path | BinaryIO, expected: InputSpec | None, limits: PictureLimits = LIMITS) -> Pixels:
    """Return the picture, upright, as uint8 [C, H, W], resized by the policy of `expected`.

    Without `expected` it keeps its size and is grey or RGB as stored. Raises PictureError when it is damaged, too large, or not a
    picture; DataError when the extractor does not take pictures.
    """
    if expected:
        require_pictures(expected, path)
        if expected.channels not in _MODES:
            raise DataError(f"{path}: a picture has 1 or 3 channels, the extractor takes {expected.channels}")
    with _opened(path, limits) as file:
        if expected:  # JPEG is decoded at 1/2 to 1/8 of its size, if enough is left of it
            side = KEPT_DETAIL * max(expected.height, expected.width)
            file.draft(None, (side, side))
        file.load()
        upright = _UPRIGHT.get(file.getexif().get(ORIENTATION, 1))
        if expected:
            size = (expected.width, expected.height)
            size = size[::-1] if upright in _SIDES_SWAPPED else size
            picture = _resized(file, _MODES[expected.channels], size, expected.resize)
        else:
            grey = file.mode in ("1", "L", "LA", "F") or file.mode.startswith("I")
            picture = _converted(file, "L" if grey else "RGB")
        if upright is not None:
            picture = picture.transpose(upright)
    pixels = np.asarray(picture, np.uint8)
    pixels = pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return _filled(pixels, expected) if expected else pixels


def fit(images: Pixels, input: InputSpec, where: object = "images") -> Pixels:
    """Return images uint8 [N, C, H, W] in the size of `input`, with the pixels that `decode` gives for the same pictures in PNG files.

    One channel is repeated for an extractor that takes more. Raises DataError, which begins with `where`, for another number of channels.
    """
    require_pictures(input, where)
    channels, height, width = images.shape[1:]
    if channels not in (1, input.channels):
        raise DataError(
            f"{where}: images of {list(images.shape[1:])} [C, H, W], the extractor takes {list(input.shape)}"
        )
    if channels < input.channels:
        images = images.repeat(input.channels, axis=1)
    if (height, width) == input.shape[1:]:
        return images
    size = (input.width, input.height)
    fitted = np.empty((len(images), *input.shape), np.uint8)
    for row, image in enumerate(images):
        planes = (Image.fromarray(np.ascontiguousarray(plane)) for plane in image)
        scaled = [np.asarray(_resized(plane, "L", size, input.resize)) for plane in planes]
        fitted[row] = _filled(np.stack(scaled), input)
    return fitted


def _resized(picture: Image.Image, mode: str, size: Size, policy: Resize) -> Image.Image:
    """Scale a picture by the policy, to `size`, or to less in one dimension for "letterbox"."""
    width, height = picture.size
    x_scale, y_scale = size[0] / width, size[1] / height
    if policy != "stretch":
        x_scale = y_scale = (max if policy == "crop" else min)(x_scale, y_scale)
    # the centre that is kept, and what becomes of it
    kept = (min(width, size[0] / x_scale), min(height, size[1] / y_scale))
    inner = (min(size[0], max(1, round(width * x_scale))), min(size[1], max(1, round(height * y_scale))))
    x_block, y_block = (max(1, int(kept[i] / inner[i] / KEPT_DETAIL)) for i in range(2))
    picture = _reduced(picture, mode, x_block, y_block)
    left, top = (width - kept[0]) / 2, (height - kept[1]) / 2
    box = (left / x_block, top / y_block, (left + kept[0]) / x_block, (top + kept[1]) / y_block)
    return picture.resize(inner, Image.Resampling.LANCZOS, box=box)


def _reduced(picture: Image.Image, mode: str, x_block: int, y_block: int) -> Image.Image:
    """Convert a picture to `mode` and average its blocks of pixels, in strips, so that no second large picture arises."""
    if picture.mode == mode and x_block == y_block == 1:
        return picture
    width, height = picture.size
    reduced = Image.new(mode, (-(-width // x_block), -(-height // y_block)))
    rows = max(1, STRIP_PIXELS // (width * y_block)) * y_block
    for top in range(0, height, rows):
        strip = picture.crop((0, top, width, min(top + rows, height)))
        reduced.paste(_converted(strip, mode).reduce((x_block, y_block)), (0, top // y_block))
    return reduced


def _converted(picture: Image.Image, mode: str) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits; Pillow's conversion would clip them
        picture = Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))
    elif picture.mode == "F":  # Pillow's conversion would round 0..1 to black
        pixels = np.asarray(picture)
        if not ((pixels >= 0) & (pixels <= 1)).all():  # also rejects NaN
            raise _UnusableError(FLOAT_ADVICE)
        picture = Image.fromarray(np.rint(255 * pixels).astype(np.uint8))
    return picture.convert(mode)


def _filled(pixels: Pixels, input: InputSpec) -> Pixels:
    """Centre pixels [C, h, w] in the input's size, filled with its mean colour; only "letterbox" leaves room."""
    if pixels.shape == input.shape:
        return pixels
    colour = np.rint(255 * np.broadcast_to(input.mean, input.channels)).clip(0, 255)
    canvas = np.empty(input.shape, np.uint8)
    canvas[:] = colour[:, None, None]
    _, height, width = pixels.shape
    top, left = (input.height - height) // 2, (input.width - width) // 2
    canvas[:, top : top + height, left : left + width] = pixels
    return canvas


class _UnusableError(Exception):
    """The reason why a picture that can be read cannot be used."""


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
    except _UnusableError as error:
        raise PictureError(path, str(error)) from error
    except _BROKEN as error:
        raise PictureError(path, UNREADABLE) from error


def _register_heic() -> bool:
    """Let Pillow read HEIC; False if pillow-heif is not installed."""
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError:
        return False
    return True
