"""16-bit pictures that use fewer bits keep their shades, by the range of their folder and not by that of one picture."""

import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl.inputs import InputSpec
from edge_fl.modalities import UnusableFileError, limits, pictures
from edge_fl.modalities.limits import Depth

GREY = InputSpec((1, 8, 8))
RAMP = np.arange(64, dtype=np.uint16).reshape(8, 8)


def saved(path: Path, levels: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(levels).save(path, **options)  # type: ignore[arg-type]
    return path


def saved_colour(path: Path, level: int) -> Path:
    """A PNG with 16 bits per channel, which Pillow cannot write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    rows = (b"\0" + struct.pack(">3H", level, level // 2, 0) * 8) * 8
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    return path


@pytest.mark.parametrize("bits", pictures.RANGES)
@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_the_bits_in_use_are_found_and_the_upper_8_of_them_are_kept(
    tmp_path: Path, bits: int, suffix: str
) -> None:
    levels = (RAMP << bits - 6).astype(np.uint16)
    path = saved(tmp_path / f"x{suffix}", levels)
    assert pictures.depth_of([path]) == Depth(bits)
    assert np.array_equal(pictures.decode(path, GREY, bits=bits)[0], RAMP << 2)
    assert np.array_equal(pictures.decode(path, None, bits=bits)[0], RAMP << 2)


def test_all_bits_are_the_default_and_another_picture_does_not_change(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.png", (RAMP << 10).astype(np.uint16))
    for bits in (0, 16):
        assert np.array_equal(pictures.decode(path, None, bits=bits)[0], RAMP << 2)
    path = saved(tmp_path / "8.png", RAMP.astype(np.uint8))
    assert np.array_equal(pictures.decode(path, None, bits=12)[0], RAMP)
    assert pictures.depth_of([path]) == limits.UNKNOWN_DEPTH == Depth(0)


def test_a_dark_picture_stays_dark_beside_a_bright_one(tmp_path: Path) -> None:
    dark = saved(tmp_path / "0.png", np.full((8, 8), 160, np.uint16))
    bright = saved(tmp_path / "1.png", np.full((8, 8), 4000, np.uint16))
    found = pictures.depth_of([dark, bright])
    assert found.remark == "16-bit pictures use 12 bits: scaled by 16"
    assert pictures.decode(dark, GREY, bits=found.bits).max() == 10
    assert pictures.decode(bright, GREY, bits=found.bits).min() == 250


def test_a_picture_that_uses_more_bits_is_named_instead_of_cut_off(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.png", np.full((8, 8), 4096, np.uint16))
    with pytest.raises(UnusableFileError, match=r"x\.png: uses more than 12 bits, .*: set bits = 16"):
        pictures.decode(path, GREY, bits=12)


def test_a_large_folder_is_sampled_evenly_and_damaged_files_are_passed_over(tmp_path: Path) -> None:
    files = [saved(tmp_path / f"{number:03}.png", np.full((8, 8), 1000, np.uint16)) for number in range(200)]
    saved(files[0], np.full((8, 8), 4000, np.uint16))
    files[10].write_bytes(b"half")
    assert pictures.depth_of(files) == pictures.depth_of(files) == Depth(12)
    assert pictures.depth_of(files[1:]) == Depth(10)


def test_a_pgm_brings_its_own_range(tmp_path: Path) -> None:
    (tmp_path / "x.pgm").write_bytes(b"P5\n8 8\n4095\n" + np.full((8, 8), 2048, ">u2").tobytes())
    assert pictures.depth_of([tmp_path / "x.pgm"]) == Depth(16)
    assert (pictures.decode(tmp_path / "x.pgm", GREY) == 128).all()


def test_colours_of_16_bits_are_scaled_too_and_the_remark_says_what_is_lost(tmp_path: Path) -> None:
    path = saved_colour(tmp_path / "x.png", 0x0FFF)
    found = pictures.depth_of([path])
    assert found == Depth(12, colour=True) and "keep the upper 8 of 16: store them as 8 bits" in found.remark
    pixels = pictures.decode(path, InputSpec((3, 8, 8)), bits=12)
    assert pixels[:, 0, 0].tolist() == [240, 112, 0]
    assert pictures.decode(path, InputSpec((3, 8, 8)))[:, 0, 0].tolist() == [15, 7, 0]
    with pytest.raises(UnusableFileError, match="more than 12 bits"):
        pictures.decode(BytesIO(saved_colour(tmp_path / "y.png", 0xFFFF).read_bytes()), None, bits=12)
