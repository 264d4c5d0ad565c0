"""The estimate of what decoding takes is not below the measured peak, in any format, and not far above it."""

import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from edge_fl.inputs import InputSpec
from edge_fl.modalities import UnusableFileError, limits, pictures
from edge_fl.modalities.limits import MB, FileLimits

WIDTH, HEIGHT = 2400, 1600
INPUT = InputSpec((3, 64, 64))

# Prints the estimate and the peak above that of a small picture of the same kind, in bytes; without an input the picture keeps its size.
PEAK = r"""
import re, sys
from pathlib import Path
from edge_fl.modalities import formats, pictures
from edge_fl.inputs import InputSpec
input = InputSpec((3, 64, 64)) if sys.argv[3] == "reduced" else None
def peak():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
needed = []
require = pictures._require_affordable
def remember(picture, file, stored, own_bytes, limits):
    needed.append(own_bytes + formats.decoding_bytes(picture, file, stored))
pictures._require_affordable = remember
pictures.decode(Path(sys.argv[1]), input)
before = peak()
pictures.decode(Path(sys.argv[2]), input)
print(needed[-1], peak() - before)
"""


def detail(width: int, height: int) -> Image.Image:
    rough = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BILINEAR)


def write(format: str, mode: str, path: Path, width: int, height: int, **options: object) -> None:
    picture = detail(width, height)
    if mode == "noise":
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
    elif mode == "I;16":
        picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) << 8)
    elif mode == "F":
        picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.float32) / 255)
    else:
        picture = picture.quantize(64) if mode == "P" else picture.convert(mode)
    picture.save(path, format, **options)  # type: ignore[arg-type]


def run_lengths(path: Path, width: int, height: int, body: bytes | None = None) -> None:
    """A BMP in run lengths, all of one colour."""
    row = bytes([255, 7]) * (width // 255) + bytes([width % 255, 7]) + b"\0\0"
    body = row * height + b"\0\1" if body is None else body
    start = 54 + 1024
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 0, 0, 256, 0)
    path.write_bytes(
        b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + header + bytes(1024) + body
    )


def ppm(kind: int, most: int, path: Path, width: int, height: int) -> None:
    values = np.arange(width * height * (3 if kind in (3, 6) else 1)) % most
    header = f"P{kind}\n{width} {height}\n{most}\n".encode()
    if kind < 4:
        path.write_bytes(header + " ".join(map(str, values)).encode())
    else:
        path.write_bytes(header + values.astype(">u2" if most > 255 else np.uint8).tobytes())


Write = Callable[[Path, int, int], None]
KINDS: dict[str, Write] = {
    "jpeg": partial(write, "JPEG", "RGB"),
    "jpeg grey": partial(write, "JPEG", "L"),
    "jpeg cmyk": partial(write, "JPEG", "CMYK", progressive=True),
    "jpeg progressive": partial(write, "JPEG", "RGB", progressive=True),
    "jpeg progressive 444": partial(write, "JPEG", "RGB", progressive=True, subsampling=0),
    "png": partial(write, "PNG", "RGB", compress_level=1),
    "png palette": partial(write, "PNG", "P", compress_level=1),
    "png 16": partial(write, "PNG", "I;16", compress_level=1),
    "png alpha": partial(write, "PNG", "RGBA", compress_level=1),
    "gif": partial(write, "GIF", "P"),
    "gif transparent": partial(write, "GIF", "P", transparency=3),
    "bmp": partial(write, "BMP", "RGB"),
    "bmp run lengths": run_lengths,
    "tiff": partial(write, "TIFF", "RGB"),
    "tiff lzw": partial(write, "TIFF", "RGB", compression="tiff_lzw"),
    "tiff one strip": partial(write, "TIFF", "RGB", compression="tiff_adobe_deflate", strip_size=2**31 - 1),
    "tiff jpeg": partial(write, "TIFF", "RGB", compression="jpeg"),
    "tiff float": partial(write, "TIFF", "F", compression="tiff_lzw"),
    "tiff turned": partial(write, "TIFF", "RGB", tiffinfo={274: 6}),
    "webp": partial(write, "WEBP", "RGB", method=0),
    "webp lossless": partial(write, "WEBP", "noise", lossless=True, method=0, quality=0),
    "ppm": partial(write, "PPM", "RGB"),
    "ppm 100 levels": partial(ppm, 6, 100),
    "pgm 4095 levels": partial(ppm, 5, 4095),
    "pgm as text": partial(ppm, 2, 255),
}
if features.check("avif"):
    KINDS |= {
        "avif": partial(write, "AVIF", "RGB", speed=10),
        "avif alpha": partial(write, "AVIF", "RGBA", speed=10, subsampling="4:4:4"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [  # each kind one way in CI, both nightly
        pytest.param(kind, how, marks=pytest.mark.nightly if (number + whole) % 2 else ())
        for number, kind in enumerate(KINDS)
        for whole, how in enumerate(("reduced", "whole"))
    ],
)
def test_the_estimate_is_not_below_the_peak(tmp_path: Path, kind: str, how: str) -> None:
    scale = 4 if kind.startswith(("ppm 100", "pgm")) else 1  # decoded in Python, slowly
    KINDS[kind](tmp_path / "small", 16, 16)
    KINDS[kind](tmp_path / "large", WIDTH // scale, HEIGHT // scale)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large"), how]
    estimate, peak = map(
        int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    sys.stdout.write(f"{kind}, {how}: {peak / MB:.1f} MB measured, {estimate / MB:.1f} MB estimated\n")
    assert peak <= estimate <= 2.5 * peak + 28 * MB


def refused(path: Path, limits: FileLimits) -> str:
    with pytest.raises(UnusableFileError) as raised:
        pictures.decode(path, INPUT, limits)
    with pytest.raises(UnusableFileError):
        pictures.check(path, limits)
    assert raised.value.reason == pictures.TOO_LARGE
    return raised.value.detail


ON_A_PI = FileLimits(max_decoding_bytes=213 * MB)
"""Half the 427 MB of a Raspberry Pi Zero 2 W."""


def test_small_files_of_large_pictures_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    Image.new("RGB", (7874, 7874)).save(tmp_path / "x.webp", method=0, lossless=True)
    assert (tmp_path / "x.webp").stat().st_size < 100_000
    assert refused(tmp_path / "x.webp", FileLimits(max_decoding_bytes=512 * MB)) == (
        "decoding takes about 992 MB, this board allows 512 MB (62.0 megapixels of WEBP)"
    )
    run_lengths(tmp_path / "x.bmp", 8000, 8000, bytes([0, 2, 255, 255]) * 31 + b"\0\1")
    assert "(64.0 megapixels of BMP)" in refused(tmp_path / "x.bmp", FileLimits(max_decoding_bytes=128 * MB))
    run_lengths(tmp_path / "row.bmp", 10_000_000, 1, bytes([0, 2, 0, 255]))  # 255 rows of zeros
    assert "this board allows 512 MB" in refused(
        tmp_path / "row.bmp", FileLimits(max_decoding_bytes=512 * MB)
    )


def test_a_photo_of_64_or_200_megapixels_is_read_where_a_small_jpeg_is(tmp_path: Path) -> None:
    for size in ((9248, 6936), (16320, 12240)):
        Image.new("L", size, 90).save(tmp_path / "x.jpg", quality=30)
        pictures.check(tmp_path / "x.jpg", ON_A_PI)
        assert pictures.decode(tmp_path / "x.jpg", INPUT, ON_A_PI).mean() == pytest.approx(90, abs=1)
    Image.new("L", (20000, 15001)).save(tmp_path / "x.jpg", quality=30)
    assert refused(tmp_path / "x.jpg", ON_A_PI) == "300.0 megapixels, at most 300"


def test_a_jpeg_whose_scans_hold_one_component_each_counts_as_progressive(tmp_path: Path) -> None:
    write("JPEG", "RGB", tmp_path / "x.jpg", 4000, 3000)
    pictures.check(tmp_path / "x.jpg", FileLimits(max_decoding_bytes=30 * MB))
    whole = (tmp_path / "x.jpg").read_bytes()
    scan = whole.index(b"\xff\xda")
    (tmp_path / "x.jpg").write_bytes(whole[:scan] + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0" + whole[scan + 14 :])
    with pytest.raises(UnusableFileError, match="this board allows 30 MB"):
        pictures.check(tmp_path / "x.jpg", FileLimits(max_decoding_bytes=30 * MB))


@pytest.mark.parametrize(("memory_mb", "allowed_mb"), [(100, 128), (427, 213), (906, 453), (8000, 512)])
def test_a_board_allows_half_its_memory_within_bounds(
    monkeypatch: pytest.MonkeyPatch, memory_mb: int, allowed_mb: int
) -> None:
    monkeypatch.setattr(limits, "total_memory_mb", lambda: memory_mb)
    limits.board_bytes.cache_clear()
    try:
        assert FileLimits().decoding_bytes // MB == allowed_mb
    finally:
        limits.board_bytes.cache_clear()
