"""The closed list of picture formats, found by the first bytes of a file, whatever its name is.

Pillow knows about forty more. Some of them start a program (EPS: Ghostscript) or hold a picture of yet another format (ICNS, ICO, MIC,
FPX, IPTC), and cameras write none of them: they are not read. To add a format: its first bytes here, and what decoding it costs in
`decoding_cost`.
"""

from typing import NamedTuple

SUFFIXES = frozenset(
    ".png .jpg .jpeg .jfif .mpo .webp .bmp .gif .tif .tiff .ppm .pgm .heic .heif .avif".split()
)
START_BYTES = 64
"""Of a file, enough to find its format."""


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
