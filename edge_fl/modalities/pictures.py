"""Pictures as arrays: decode a file with Pillow within limits, and fit pictures to an extractor's input by its resize policy.

Training, export and devices share this module, and no other opens a picture. Whatever its decoder raises is an UnusableFileError.
Memory: one decoded picture (Pillow stores RGB as 4 bytes per pixel: 48 MB for 12 megapixels) and strips of it. A large JPEG is decoded at a
fraction of its size, so it takes less. One picture is decoded at a time in a process, so that the limit on its memory is one on all.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError

from edge_fl.errors import DataError, brief
from edge_fl.files import paths
from edge_fl.files.npz import Array
from edge_fl.inputs import InputSpec, Resize
from edge_fl.modalities import (
    SIDE,
    Reading,
    Source,
    Thumbnails,
    UnusableFileError,
    formats,
    opened,
    require_kind,
)
from edge_fl.modalities.formats import PictureFormat
from edge_fl.modalities.limits import FULL_BITS, LIMITS, MB, Depth, FileLimits
from edge_fl.seeds import generator

log = logging.getLogger(__name__)

HEIC_ADVICE = "HEIC needs pip install 'edge-fl[heic]'"
FLOAT_ADVICE = "floating-point pixels outside 0..1: store them as 8 or 16 bits"
TOO_LARGE = "too large for this board"
STRIP_PIXELS = 2**20
KEPT_DETAIL = 2
"""Large pictures are first averaged over blocks of pixels, down to this multiple of the final size."""
ORIENTATION = 0x0112  # EXIF tag
EXIF_IFD, DATE_TIME_ORIGINAL = 0x8769, 0x9003
_MIRRORED = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (-1, 1), 7: (-1, -1), 8: (1, -1)}  # steps in y and x
_SIDES_SWAPPED = range(5, 9)
_MODES = {1: "L", 3: "RGB"}
# what Pillow converts to grey and RGB
_PLAIN = frozenset("1 L LA La P PA RGB RGBX RGBA RGBa CMYK YCbCr".split())
_NO_DECODER = "%s is not read by this installation of Pillow"
_DECODING = threading.Lock()

# Pillow's limit on pixels, above which it warns, and which it doubles before it raises: ours are on memory, and let such a JPEG pass.
Image.MAX_IMAGE_PIXELS = LIMITS.max_pixels

Pixels = NDArray[np.uint8]
BLOCK = 4096  # images per step in a pass over a dataset
GREY = (0.299, 0.587, 0.114)
Size = tuple[int, int]  # width, height, as in Pillow

RANGES = (8, 10, 12, 14, FULL_BITS)
WIDE_SUFFIXES = frozenset({".png", ".tif", ".tiff", ".pgm", ".ppm"})
HEADERS, DECODED = 64, 16
"""Files of a folder whose headers are read, and 16-bit pictures among them that are decoded."""
Used = tuple[int, bool]
"""Bits that one picture uses, 0 if it has no more than 8, and whether it has colours."""


def arrays(x: Array, where: str) -> Pixels:
    """Convert images to uint8 [N, C, H, W], from integers 0..255 or floats 0..1; [N, H, W], [N, H, W, C] or [N, C, H, W] with C 1 or 3.

    An ambiguous array is read with channels last. Raises DataError, which begins with `where`.
    """
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in _MODES:
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or x.shape[1] not in _MODES:
        raise DataError(
            f"{where}: images of shape {list(x.shape)}, expected [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels"
        )
    return np.ascontiguousarray(_levels(x, where))


def _levels(x: Array, where: str) -> Pixels:
    if x.dtype == np.uint8:
        return x
    kind = x.dtype.kind
    if kind not in "iuf":
        raise DataError(f"{where}: images are {x.dtype}, expected uint8 (0..255) or floats (0..1)")
    top = 1 if kind == "f" else 255
    if x.size and not (x.min() >= 0 and x.max() <= top):  # NaN fails both comparisons
        raise DataError(f"{where}: {x.dtype} images range over {x.min():g}..{x.max():g}, expected 0..{top}")
    return (x if kind != "f" else np.rint(x * 255)).astype(np.uint8)


def input_of(x: Pixels, rows: NDArray[np.int64], given: InputSpec | None = None) -> InputSpec:
    """Return the input of images [N, C, H, W], with mean and std of the 0..1 pixels at `rows` per channel; else as `given`.

    The sums are of whole numbers, block by block, to avoid a float copy of the dataset.
    """
    channels, height, width = x.shape[1:]
    total, squares = np.zeros(channels, np.int64), np.zeros(channels, np.int64)
    for start in range(0, len(rows), BLOCK):
        block = x[rows[start : start + BLOCK]].astype(np.int32)
        total += block.sum(axis=(0, 2, 3), dtype=np.int64)
        squares += np.square(block).sum(axis=(0, 2, 3), dtype=np.int64)
    pixels = len(rows) * height * width
    mean = total / pixels
    # a constant channel is divided by one grey level, not by zero
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 1.0))
    input = given or InputSpec((channels, height, width))
    means, stds = (tuple(round(value, 6) for value in (each / 255).tolist()) for each in (mean, std))
    return structs.replace(input, shape=(channels, height, width), mean=means, std=stds)


def synthetic(input: InputSpec, count: int, seed: int) -> Pixels:
    """Images [N, C, H, W] of noise with amplitude 1/frequency, as in photographs: mostly grey, of various brightness and contrast."""
    rng = generator(seed, "release.synthetic")
    shape = (count, input.channels + 1, input.height, input.width)
    frequency = np.hypot(np.fft.fftfreq(input.height)[:, None], np.fft.rfftfreq(input.width))
    spectrum = np.fft.rfft2(rng.standard_normal(shape)) / np.maximum(frequency, 1 / max(shape[2:]))
    noise = np.fft.irfft2(spectrum, s=shape[2:])
    noise /= noise.std((2, 3), keepdims=True)
    grey, colour = noise[:, :1], noise[:, 1:]
    brightness, contrast = (rng.uniform(*limits, (count, 1, 1, 1)) for limits in ((0.3, 0.7), (0.1, 0.35)))
    pixels = 255 * np.clip(brightness + contrast * (0.8 * grey + 0.45 * colour), 0, 1)
    return pixels.astype(np.uint8)


def thumbnails(x: Pixels) -> Thumbnails:
    """Images [n, C, H, W] with 1 or 3 channels -> grey means of SIDE x SIDE cells, uint8 [n, SIDE²]."""
    _, channels, height, width = x.shape
    down, across = _cells(height), _cells(width)
    colours = np.array(GREY if channels == len(GREY) else [1 / channels] * channels, np.float32)
    found = np.empty((len(x), SIDE * SIDE), np.uint8)
    for row, image in enumerate(x):
        grey = np.tensordot(colours, image.astype(np.float32), 1)
        found[row] = np.rint(down @ grey @ across.T).clip(0, 255).reshape(-1).astype(np.uint8)
    return found


def _cells(length: int, count: int = SIDE) -> NDArray[np.float32]:
    """Weights [count, length] of the mean of each of `count` equal cells; values on an edge count by their part."""
    edges = np.linspace(0, length, count + 1)
    starts, places = edges[:-1, None], np.arange(length)
    overlap = np.minimum(edges[1:, None], places + 1) - np.maximum(starts, places)
    return np.asarray(overlap.clip(0) / (length / count), np.float32)


def check(path: Path, limits: FileLimits = LIMITS) -> None:
    """Read the header of a picture file, not its pixels. Raises UnusableFileError as `decode`, apart from damage behind the header.

    A JPEG counts as small as it can be decoded.
    """
    with _opened(path, limits) as (picture, file):
        stored = picture.size
        picture.draft(None, (1, 1))
        _require_affordable(picture, file, stored, 0, limits)


class Header(NamedTuple):
    """Size (width, height) of a picture as it is stored, its EXIF DateTimeOriginal ("": none), time of its file in seconds since 1970.

    wide: whether it has 16 bits per channel.
    """

    size: Size
    taken: str
    written_s: float
    wide: bool = False


def header(path: Path, limits: FileLimits = LIMITS) -> Header:
    """Return what the header of a picture file says. Raises UnusableFileError as `check`."""
    with _opened(path, limits) as (picture, file):
        return Header(picture.size, _taken(picture), os.fstat(file.fileno()).st_mtime, _is_wide(picture))


def is_wide(path: Path, limits: FileLimits = LIMITS) -> bool:
    """Whether a picture has 16 bits per channel, by its header. Raises UnusableFileError."""
    with _opened(path, limits) as (picture, _):
        return _is_wide(picture)


def bits_used(path: Source, limits: FileLimits = LIMITS) -> tuple[int, bool]:
    """Return the bits that the brightest pixel of a 16-bit picture uses, and whether it has colours; 0 bits for other pictures.

    Raises UnusableFileError.
    """
    with _opened(path, limits) as (picture, file):
        if not _is_wide(picture):
            return 0, False
        colour = _is_wide_colour(picture)
        _require_affordable(picture, file, picture.size, 0, limits)
        picture.load()
        most = _highest(picture)
        return min(most.bit_length() + (FULL_BITS - 8 if colour else 0), FULL_BITS), colour


def read(
    path: Source, input: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
) -> Reading:
    """Return the picture in a file as `decode`, as the only sample."""
    return Reading(decode(path, input, limits, bits)[None])


def decode(
    path: Source, expected: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
) -> Pixels:
    """Return the picture, upright, as uint8 [C, H, W], resized by the policy of `expected`.

    Without `expected` it keeps its size and is grey or RGB as stored. bits: how many a 16-bit picture uses, of which the upper 8 are
    returned; 0: all of them. Raises UnusableFileError when it is damaged, too large, not a picture, or uses more bits; DataError when the
    extractor does not take pictures.
    """
    bits = bits or FULL_BITS
    where = paths.text(path) if isinstance(path, Path) else "picture"
    if expected:
        require_kind(expected, "picture", where)
        if expected.channels not in _MODES:
            raise DataError(
                f"{where}: a picture has 1 or 3 channels, the extractor takes {expected.channels}"
            )
    with _opened(path, limits) as (picture, file):
        stored = picture.size
        if expected:  # JPEG is decoded at 1/2 to 1/8 of its size, if enough is left of it
            side = KEPT_DETAIL * max(expected.height, expected.width)
            picture.draft(None, (side, side))
        mode = _MODES[expected.channels] if expected else _mode(picture)
        own = _own_bytes(picture, mode, expected)
        _require_affordable(picture, file, stored, own, limits)
        wide_colour = _is_wide_colour(picture)
        picture.load()
        orientation = _orientation(picture)
        upright: Image.Image = _brightened(picture, bits) if wide_colour else picture
        if not expected:
            return _whole(upright, mode, orientation, bits)
        size = (expected.width, expected.height)
        size = size[::-1] if orientation in _SIDES_SWAPPED else size
        pixels = _planes(_resized(upright, mode, size, expected.resize, bits))
        return _filled(np.ascontiguousarray(_turned(pixels, orientation)), expected)


def fit(images: Pixels, input: InputSpec, where: object = "images") -> Pixels:
    """Return images uint8 [N, C, H, W] in the size of `input`, with the pixels that `decode` gives for the same pictures in PNG files.

    One channel is repeated for an extractor that takes more. Raises DataError, which begins with `where`, for another number of channels.
    """
    require_kind(input, "picture", where)
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


def grey(pixels: Pixels) -> Pixels:
    """Return the brightness [H, W] of RGB pixels [H, W, 3]."""
    return np.asarray(Image.fromarray(pixels).convert("L"), np.uint8)


def jpeg(pixels: Pixels, quality: int) -> bytes:
    """Encode pixels, grey [H, W] or RGB [H, W, 3]."""
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _is_wide(picture: ImageFile.ImageFile) -> bool:
    return picture.mode.startswith("I") or _is_wide_colour(picture)


def _is_wide_colour(picture: ImageFile.ImageFile) -> bool:
    """Whether a picture that is not loaded has 16 bits per channel of a colour; Pillow reads the upper 8."""
    if picture.format not in ("PNG", "TIFF") or picture.mode.startswith("I") or not picture.tile:
        return False
    arguments = picture.tile[0][3]
    return ";16" in str(arguments[0] if isinstance(arguments, tuple) else arguments)


def _brightened(picture: Image.Image, bits: int) -> Image.Image:
    """Scale the upper 8 bits of 16-bit colours that use fewer."""
    if bits == FULL_BITS:
        return picture
    shift = FULL_BITS - bits
    _require_within(_highest(picture) << 8, bits)
    return picture.point([min(255, level << shift) for level in range(256)] * len(picture.getbands()))


def _highest(picture: Image.Image) -> int:
    """The highest level of any channel but transparency, at most 65535."""
    extrema: Any = picture.getextrema()
    pairs = [extrema] if len(picture.getbands()) == 1 else extrema
    colours = [pair for band, pair in zip(picture.getbands(), pairs, strict=True) if band != "A"]
    return min(65535, int(max(highest for _, highest in colours)))


def _require_within(highest: int, bits: int) -> None:
    if highest >> bits:
        reason = f"uses more than {bits} bits, the range of these pictures: set bits = {FULL_BITS}"
        raise UnusableFileError(None, reason)


def _mode(picture: Image.Image) -> str:
    """The mode of a picture's pixels as they are returned without an extractor: grey or RGB, as stored."""
    grey = picture.mode in ("1", "L", "LA", "F") or picture.mode.startswith("I")
    return "L" if grey else "RGB"


def _planes(picture: Image.Image) -> Pixels:
    """Return the pixels [C, H, W] of a picture of mode L or RGB, as a view."""
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _whole(picture: Image.Image, mode: str, orientation: int, bits: int) -> Pixels:
    """Convert a whole picture in strips, so that no second one arises in Pillow."""
    width, height = picture.size
    stored = np.empty((len(mode), height, width), np.uint8)
    for top, bottom in _strips(picture.size, 1):
        stored[:, top:bottom] = _planes(_converted(picture.crop((0, top, width, bottom)), mode, bits))
    return _turned(stored, orientation)


def _turned(stored: Pixels, orientation: int) -> Pixels:
    """Return the view of pixels [C, H, W] that is upright."""
    y_step, x_step = _MIRRORED.get(orientation, (1, 1))
    mirrored = stored[:, ::y_step, ::x_step]
    return mirrored.transpose(0, 2, 1) if orientation in _SIDES_SWAPPED else mirrored


def _orientation(picture: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1, as stored, if the EXIF data are damaged."""
    try:
        orientation = picture.getexif().get(ORIENTATION, 1)
    except Exception:  # whatever the parser raises: the pixels are good
        log.debug("EXIF data that cannot be read", exc_info=True)
        return 1
    return orientation if orientation in range(1, 9) else 1


def _taken(picture: Image.Image) -> str:
    """Return DateTimeOriginal of the EXIF data; "" if there is none or it is damaged."""
    try:
        return str(picture.getexif().get_ifd(EXIF_IFD).get(DATE_TIME_ORIGINAL, ""))
    except Exception:  # as `_orientation`
        log.debug("EXIF data that cannot be read", exc_info=True)
        return ""


def grey_png(file: BinaryIO, limits: FileLimits = LIMITS) -> bytes:
    """Return a grey 16-bit picture as a PNG with all its bits. Raises UnusableFileError."""
    with _opened(file, limits) as (picture, source):
        _require_affordable(picture, source, picture.size, 8 * picture.size[0] * picture.size[1], limits)
        buffer = BytesIO()
        Image.fromarray(np.asarray(picture).clip(0, 65535).astype(np.uint16)).save(buffer, "PNG")
    return buffer.getvalue()


class _Plan(NamedTuple):
    """How a picture gets its size: the centre that is kept of it, what becomes of that, and the blocks that are averaged before."""

    kept: tuple[float, float]
    inner: Size
    blocks: Size

    @classmethod
    def of(cls, picture: Size, size: Size, policy: Resize) -> _Plan:
        """Scale a picture by the policy, to `size`, or to less in one dimension for "letterbox"."""
        width, height = picture
        x_scale, y_scale = size[0] / width, size[1] / height
        if policy != "stretch":
            x_scale = y_scale = (max if policy == "crop" else min)(x_scale, y_scale)
        kept = (min(width, size[0] / x_scale), min(height, size[1] / y_scale))
        inner = (min(size[0], max(1, round(width * x_scale))), min(size[1], max(1, round(height * y_scale))))
        x_block, y_block = (max(1, int(kept[i] / inner[i] / KEPT_DETAIL)) for i in range(2))
        return cls(kept, inner, (x_block, y_block))


def _resized(
    picture: Image.Image, mode: str, size: Size, policy: Resize, bits: int = FULL_BITS
) -> Image.Image:
    """Scale a picture by the policy, to `size`, or to less in one dimension for "letterbox"."""
    kept, inner, (x_block, y_block) = _Plan.of(picture.size, size, policy)
    width, height = picture.size
    picture = _reduced(picture, mode, x_block, y_block, bits)
    left, top = (width - kept[0]) / 2, (height - kept[1]) / 2
    box = (left / x_block, top / y_block, (left + kept[0]) / x_block, (top + kept[1]) / y_block)
    return picture.resize(inner, Image.Resampling.LANCZOS, box=box)


def _reduced(picture: Image.Image, mode: str, x_block: int, y_block: int, bits: int) -> Image.Image:
    """Convert a picture to `mode` and average its blocks of pixels, in strips, so that no second large picture arises."""
    if picture.mode == mode and x_block == y_block == 1:
        return picture
    width, height = picture.size
    reduced = Image.new(mode, (-(-width // x_block), -(-height // y_block)))
    for top, bottom in _strips(picture.size, y_block):
        strip = picture.crop((0, top, width, bottom))
        reduced.paste(_converted(strip, mode, bits).reduce((x_block, y_block)), (0, top // y_block))
    return reduced


def _strips(size: Size, y_block: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the row behind the last of strips of about STRIP_PIXELS, in whole blocks."""
    width, height = size
    rows = max(1, STRIP_PIXELS // (width * y_block)) * y_block
    for top in range(0, height, rows):
        yield top, min(top + rows, height)


def _own_bytes(picture: ImageFile.ImageFile, mode: str, expected: InputSpec | None) -> int:
    """Bytes that converting and reducing a decoded picture takes in addition to it."""
    width, height = picture.size
    x_block = y_block = 1
    if expected:
        x_block, y_block = _Plan.of(picture.size, (expected.width, expected.height), expected.resize).blocks
    result = -(-width // x_block) * -(-height // y_block) * (4 if expected and mode == "RGB" else len(mode))
    strip = min(height, max(y_block, STRIP_PIXELS // width)) * width
    scaled = 4 * width * height if _is_wide_colour(picture) else 0
    return result + scaled + strip * (8 if picture.mode in _PLAIN else 24)


def _converted(picture: Image.Image, mode: str, bits: int) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits; Pillow's conversion would clip them
        levels = np.asarray(picture).clip(0, 65535)
        _require_within(int(levels.max()), bits)
        picture = Image.fromarray((levels >> bits - 8).astype(np.uint8))
    elif picture.mode == "F":  # Pillow's conversion would round 0..1 to black
        pixels = np.asarray(picture)
        if not ((pixels >= 0) & (pixels <= 1)).all():  # also rejects NaN
            raise UnusableFileError(None, FLOAT_ADVICE)
        picture = Image.fromarray(np.rint(255 * pixels).astype(np.uint8))
    elif picture.mode not in _PLAIN:
        raise UnusableFileError(None, f"{picture.mode} colours are not read: store them as RGB")
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


@contextmanager
def _opened(path: Source, limits: FileLimits) -> Iterator[tuple[ImageFile.ImageFile, BinaryIO]]:
    """Open a picture and its file; whatever is raised inside the block becomes a UnusableFileError."""
    with _DECODING, opened(path) as file, _explained(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about palettes and metadata; errors are raised
        format = formats.find(file.read(formats.START_BYTES))
        if isinstance(format, str):
            raise UnusableFileError(None, format)
        _require_decoder(format)
        if (size := file.seek(0, 2)) > limits.decoding_bytes:  # some decoders read the whole file at once
            detail = f"a file of {size / MB:.0f} MB, this board allows {limits.decoding_bytes / MB:.0f} MB"
            raise UnusableFileError(None, TOO_LARGE, detail)
        file.seek(0)
        with Image.open(file, formats=[format.name]) as picture:
            yield picture, file


def _require_decoder(format: PictureFormat) -> None:
    """Load the decoder of a format, which lets Pillow open it."""
    try:
        plugin = importlib.import_module(format.plugin)
    except ImportError as error:
        advice = HEIC_ADVICE if format is formats.HEIF else _NO_DECODER % format.name
        raise UnusableFileError(None, advice) from error
    if format is formats.HEIF:
        plugin.register_heif_opener()
    if format.name not in Image.OPEN or not getattr(plugin, "SUPPORTED", True):
        raise UnusableFileError(None, _NO_DECODER % format.name)


def _require_affordable(
    picture: ImageFile.ImageFile, file: BinaryIO, stored: Size, own_bytes: int, limits: FileLimits
) -> None:
    """Check what decoding takes against the limits. `stored`: the size before a JPEG's reduction. `own_bytes`: taken by this module."""
    megapixels = stored[0] * stored[1] / 1e6
    if stored[0] * stored[1] > limits.max_pixels:
        detail = f"{megapixels:.1f} megapixels, at most {limits.max_pixels / 1e6:g}"
        raise UnusableFileError(None, TOO_LARGE, detail)
    needed = own_bytes + formats.decoding_bytes(picture, file, stored)
    if needed > (allowed := limits.decoding_bytes):
        detail = f"decoding takes about {needed / MB:.0f} MB, this board allows {allowed / MB:.0f} MB"
        detail += f" ({megapixels:.1f} megapixels of {picture.format})"
        raise UnusableFileError(None, TOO_LARGE, detail)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of Pillow in the block into what they mean."""
    try:
        yield
    except Exception as error:
        log.debug("a picture that cannot be used", exc_info=True)
        if isinstance(error, Image.DecompressionBombError):
            raise UnusableFileError(None, TOO_LARGE, brief(str(error))) from error
        if isinstance(error, UnidentifiedImageError):  # its text names the object that was read
            raise UnusableFileError(None, "damaged", "its header cannot be read") from error
        words = str(error).lower()
        if getattr(error, "errno", None) is None and "truncated" in words:
            raise EOFError from error
        raise


def depth_of(
    files: Sequence[Path],
    limits: FileLimits = LIMITS,
    known: Callable[[Path], Used | None] = lambda path: None,
    marked: Callable[[Path], AbstractContextManager[None]] = lambda path: nullcontext(),
) -> Depth:
    """Return the smallest of RANGES that holds a sample of the 16-bit pictures among `files`, always the same of the same files.

    Cameras store 10, 12 or 14 bits in files of 16, and all of a folder alike; the range of each picture alone would make a dark one bright.
    `known` returns what is known of a file, which is not opened then. A file is opened inside `marked`.
    """
    sample = _evenly([path for path in files if path.suffix.lower() in WIDE_SUFFIXES], HEADERS)
    wide = []
    for path in sample:
        with suppress(UnusableFileError), marked(path):  # a skip, with its reason, once it is read
            found = known(path)
            if is_wide(path, limits) if found is None else found[0]:
                wide.append(path)
    used, colour = 0, False
    for path in _evenly(wide, DECODED):
        with suppress(UnusableFileError), marked(path):
            bits, has_colour = known(path) or bits_used(path, limits)
            used, colour = max(used, bits), colour or has_colour
    return Depth(next(most for most in RANGES if used <= most) if wide else 0, colour)


def _evenly(files: Sequence[Path], most: int) -> Sequence[Path]:
    """At most `most` of the files, evenly spaced."""
    return [files[number * len(files) // most] for number in range(most)] if len(files) > most else files
