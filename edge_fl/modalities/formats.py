"""The closed list of picture formats, found by the first bytes of a file, whatever its name is, and the memory that decoding takes.

Pillow knows about forty more. Some of them start a program (EPS: Ghostscript) or hold a picture of yet another format (ICNS, ICO, MIC,
FPX, IPTC), and cameras write none of them: they are not read. To add a format: its first bytes, and what decoding it costs.

The memory is estimated from the header of a picture alone. The bytes per pixel are peaks of a process that decodes 12 megapixels (Pillow
13.0, libwebp 1.6, libavif 1.4, pillow-heif 1.8, x86-64); `tests/edge_fl/data/test_decoding_cost.py` measures them again:

| format | bytes per pixel | what they are |
| --- | --- | --- |
| PNG, GIF, JPEG, uncompressed BMP, PPM, TIFF | 1 to 4 | Pillow's picture; a JPEG's after its reduction to a fraction |
| JPEG in several scans (progressive) | 3 to 8 more | 2 per coefficient at full size: 3 with 4:2:0, 6 with 4:4:4, 8 with CMYK |
| BMP with run lengths, PPM of other than 255 levels | 3.1 to 10 | decoded in Python: a bytearray that grows, a copy, the picture |
| compressed TIFF | 1 to 10.5 | also the file, which is mapped, and a strip or tile |
| WebP | 16.1 and the file | two frames of the animation, which any WebP is to its decoder, a copy, the picture |
| AVIF, HEIC | 12, 9.3 | planes, RGB, a copy, the picture; 10 bits, which Pillow does not write, take half as much again |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

from PIL import Image, ImageFile

START_BYTES = 64
"""Of a file, enough to find its format."""
BASE_BYTES = 8 * 1024**2
"""Of small pictures: the decoder's code and buffers."""
GROWING = 2.25
"""A bytearray, which allocates 1/8 more than it holds, and its copy."""
PIXEL_BYTES = {"WEBP": 16.5, "AVIF": 16.0, "HEIF": 14.0}
"""Of a pixel in all, for decoders that hold more than Pillow's picture."""
ROWS_OF_A_DELTA = 255
"""A run-length BMP may end with a jump of this many rows."""
WORDS_BYTES = 20 * 1024**2
"""A PPM as text is split into words, a megabyte at a time."""
_STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2}
_SIMPLE = (None, "raw", "packbits", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate")
_ORIENTATION, _BITS, _ROWS_PER_STRIP, _TILE_WIDTH, _TILE_LENGTH = 274, 258, 278, 322, 323
_START_OF_SCAN, _END = 0xDA, 0xD9
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}


class PictureFormat(NamedTuple):
    """A format by Pillow's name; `plugin` is the module that reads it."""

    name: str
    plugin: str


JPEG = PictureFormat("JPEG", "PIL.JpegImagePlugin")  # also MPO, whose first picture is read
PNG = PictureFormat("PNG", "PIL.PngImagePlugin")
GIF = PictureFormat("GIF", "PIL.GifImagePlugin")
BMP = PictureFormat("BMP", "PIL.BmpImagePlugin")
TIFF = PictureFormat("TIFF", "PIL.TiffImagePlugin")
WEBP = PictureFormat("WEBP", "PIL.WebPImagePlugin")
PPM = PictureFormat("PPM", "PIL.PpmImagePlugin")  # also PBM, PGM and PFM
AVIF = PictureFormat("AVIF", "PIL.AvifImagePlugin")
HEIF = PictureFormat("HEIF", "pillow_heif")

_READ = {
    b"\xff\xd8\xff": JPEG,
    b"\x89PNG\r\n\x1a\n": PNG,
    b"GIF87a": GIF,
    b"GIF89a": GIF,
    b"BM": BMP,
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), TIFF),
    **dict.fromkeys((b"P%c" % kind for kind in b"123456f"), PPM),
}
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_NOT_READ = {
    b"%!PS": "PostScript",
    b"\xc5\xd0\xd3\xc6": "PostScript",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"8BPS": "PSD",
    b"\0\0\1\0": "ICO",
    b"icns": "ICNS",
    b"\0\0\0\x0cjP": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
    b"\0\0\0\x0cJXL": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"\xd7\xcd\xc6\x9a": "WMF",
    b"\xd0\xcf\x11\xe0": "an Office, FPX or MIC file",
}


def find(start: bytes) -> PictureFormat | str:
    """Return the format of a file that begins with `start`, or why it is none of the list."""
    if not start:
        return "empty file"
    if start[4:8] == b"ftyp":
        return _of_brands(start)
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return WEBP
    for signature, format in _READ.items():
        if start.startswith(signature):
            return format
    known = (name for signature, name in _NOT_READ.items() if start.startswith(signature))
    return next((f"{name} is not read" for name in known), "content is not a picture")


def _of_brands(start: bytes) -> PictureFormat | str:
    """Tell AVIF from HEIC: "mif1" may begin either, and the compatible brands, which follow, tell which."""
    end = min(int.from_bytes(start[:4], "big"), len(start))
    brands = {start[8:12], *(start[place : place + 4] for place in range(16, end, 4))}
    if brands & _AVIF_BRANDS:
        return AVIF
    return HEIF if start[8:12] in _HEIF_BRANDS else "video is not read"


def decoding_bytes(picture: ImageFile.ImageFile, file: BinaryIO, stored: tuple[int, int]) -> int:
    """Estimate the peak of `picture.load()`. `stored`: the size before a JPEG's reduction by `draft`. Leaves the place in the file."""
    place = file.tell()
    try:
        size = file.seek(0, 2)
        decoder = _of_decoder(picture, file, stored, size)
    finally:
        file.seek(place)
    return int(BASE_BYTES + _stored(picture.mode) * math.prod(picture.size) + decoder)


def _of_decoder(
    picture: ImageFile.ImageFile, file: BinaryIO, stored: tuple[int, int], file_bytes: int
) -> float:
    """Bytes that the decoder holds in addition to Pillow's picture."""
    pixels, width = math.prod(stored), stored[0]
    match picture.format:
        case "JPEG" | "MPO":
            return 2 * _coefficients(picture, stored) if _in_several_scans(file) else 0
        case "BMP" if _decoder(picture) == "bmp_rle":
            return GROWING * (pixels + ROWS_OF_A_DELTA * width)
        case "PPM" if (decoder := _decoder(picture)).startswith("ppm"):
            decoded = GROWING * pixels * (4 if picture.mode == "I" else len(picture.getbands()))
            return decoded + (WORDS_BYTES if decoder == "ppm_plain" else 0)
        case "TIFF":
            return _of_tiff(picture, file_bytes)
        case "WEBP" | "AVIF" | "HEIF" as name:
            return (PIXEL_BYTES[name] - 4) * pixels + file_bytes
    return 0


def _stored(mode: str) -> int:
    """Bytes per pixel of Pillow's picture."""
    return _STORED.get(mode, 4)


def _decoder(picture: ImageFile.ImageFile) -> str:
    return picture.tile[0][0] if picture.tile else ""


def _coefficients(picture: Image.Image, stored: tuple[int, int]) -> float:
    """Coefficients of all components of a JPEG."""
    factors: list[tuple[int, int]] = [(layer[1], layer[2]) for layer in picture.layer]  # type: ignore[attr-defined]
    most = max(h for h, _ in factors) * max(v for _, v in factors)
    padded = [-(-side // 32) * 32 for side in stored]
    return padded[0] * padded[1] * sum(h * v for h, v in factors) / most


def _in_several_scans(file: BinaryIO) -> bool:
    """Whether a JPEG's first scan is progressive or lacks components: then its decoder holds the whole picture."""
    file.seek(2)
    components = 0
    while (marker := _marker(file)) not in (-1, _END):
        if marker in _WITHOUT_LENGTH:
            continue
        length = int.from_bytes(file.read(2), "big")
        if marker == _START_OF_SCAN:
            return file.read(1)[:1] != bytes([components])
        content = file.read(max(0, length - 2))
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            components = content[5] if len(content) > 5 else 0
            if marker not in (0xC0, 0xC1, 0xC9):
                return True
    return False


def _marker(file: BinaryIO) -> int:
    """The next marker of a JPEG; -1 at the end of the file."""
    byte = file.read(1)
    while byte and byte != b"\xff":
        byte = file.read(1)
    while byte == b"\xff":
        byte = file.read(1)
    return byte[0] if byte else -1


def _of_tiff(picture: ImageFile.ImageFile, file_bytes: int) -> float:
    tags: Mapping[int, Any] = picture.tag_v2  # type: ignore[attr-defined]
    turned = _stored(picture.mode) * math.prod(picture.size) if tags.get(_ORIENTATION, 1) != 1 else 0
    if _decoder(picture) != "libtiff":
        return turned
    width, height = picture.size
    columns = int(tags.get(_TILE_WIDTH, width))
    rows = int(tags.get(_TILE_LENGTH) or min(height, tags.get(_ROWS_PER_STRIP, height)))
    bits: tuple[int, ...] = tags.get(_BITS, (1,))
    copies = 1 if picture.info.get("compression") in _SIMPLE else 3  # another decoder within
    return turned + file_bytes + copies * columns * rows * sum(bits) / 8
