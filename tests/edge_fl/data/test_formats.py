"""Formats are a closed list, found by content: no other decoder of Pillow runs, and whatever one raises is that file's reason."""

import os
import struct
import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, features

from edge_fl.inputs import InputSpec
from edge_fl.modalities import UnusableFileError, formats, pictures

GREY = InputSpec((1, 8, 8))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
READ = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "MPO")


def saved(format: str, **options: object) -> bytes:
    buffer = BytesIO()
    shades = np.add.outer(np.arange(32), np.arange(48)).astype(np.uint8)
    Image.fromarray(shades).convert("RGB").save(buffer, format, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def reason(path: Path) -> str:
    with pytest.raises(UnusableFileError) as raised:
        pictures.decode(path, GREY)
    assert str(path) in str(raised.value)
    return raised.value.reason


@pytest.mark.parametrize("format", READ)
def test_formats_of_the_list_are_read_under_any_name(tmp_path: Path, format: str) -> None:
    path = tmp_path / "wrong.name"
    path.write_bytes(saved(format))
    pictures.check(path)
    assert pictures.decode(path, GREY).mean() == pytest.approx(39, abs=2)
    assert pictures.decode(path, None).shape[1:] == (32, 48)


def test_avif_is_read_where_pillow_has_its_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    (tmp_path / "x.jpg").write_bytes(saved("AVIF"))
    assert pictures.decode(tmp_path / "x.jpg", GREY).shape == GREY.shape
    monkeypatch.setattr("PIL.AvifImagePlugin.SUPPORTED", False)
    assert reason(tmp_path / "x.jpg") == "AVIF is not read by this installation of Pillow"


@pytest.mark.parametrize(
    "start", [EPS, b"\xc5\xd0\xd3\xc6" + struct.pack("<6I", 32, len(EPS), 0, 0, 0, 0) + EPS]
)
@pytest.mark.parametrize("name", ["x.eps", "x.jpg", "x.png", "x.tif"])
def test_postscript_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, name: str
) -> None:
    started = tmp_path / "started"
    for program in ("gs", "gswin64c", "ps2pdf"):
        (tmp_path / program).write_text(f"#!/bin/sh\ntouch {started}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / name).write_bytes(start)
    assert reason(tmp_path / name) == "PostScript is not read"
    with pytest.raises(UnusableFileError, match="PostScript is not read"):
        pictures.decode(BytesIO(start), None)
    assert not started.exists()


@pytest.mark.parametrize(
    "format", ["ICO", "ICNS", "TGA", "PCX", "SGI", "JPEG2000", "DDS", "PDF", "MSP", "SPIDER"]
)
def test_what_is_not_on_the_list_is_not_read_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    content = BytesIO()
    modes = {"MSP": "1", "SPIDER": "F", "ICNS": "RGBA"}
    Image.new(modes.get(format, "RGB"), (32, 32)).save(content, format)
    (tmp_path / "x.png").write_bytes(content.getvalue())
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    assert reason(tmp_path / "x.png") in (
        "content is not a picture",
        f"{format.replace('G2', 'G 2')} is not read",
    )


def test_a_malformed_tiff_is_that_files_reason(tmp_path: Path) -> None:
    entry = struct.pack("<HHII", 256, 2, 4, 0x2020)  # the width as text: TypeError in Pillow
    (tmp_path / "x.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4))
    assert reason(tmp_path / "x.tif") == "damaged"
    whole = bytearray(saved("TIFF", compression="tiff_lzw"))
    for place in range(4, len(whole), 3):
        damaged = whole.copy()
        damaged[place] ^= 0xFF
        try:
            pictures.decode(BytesIO(bytes(damaged)), GREY)
        except UnusableFileError as error:
            assert error.reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("decoder"), "damaged"),
        (RecursionError("deep"), "damaged"),
        (struct.error("short"), "damaged"),
        (TypeError("NoneType"), "damaged"),
        (SyntaxError("broken PNG file"), "damaged"),
        (UserWarning("as an error"), "damaged"),
        (OSError("image file is truncated (3 bytes not processed)"), "truncated"),
        (EOFError(), "truncated"),
        (MemoryError(), "out of memory"),
        (OSError(5, "Input/output error"), "input/output error"),
    ],
)
def test_whatever_a_decoder_raises_is_that_files_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def load(_: object) -> None:
        raise error

    (tmp_path / "x.png").write_bytes(saved("PNG"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    assert reason(tmp_path / "x.png") == words
    with pytest.raises(UnusableFileError) as raised:
        pictures.decode(tmp_path / "x.png", None)
    assert raised.value.passing == (words in ("out of memory", "input/output error"))


def test_the_reason_of_an_unreadable_header_names_no_object_of_the_program(tmp_path: Path) -> None:
    damaged = bytearray(saved("TIFF"))
    damaged[4:8] = struct.pack("<I", len(damaged) + 100)  # where its directory would be
    (tmp_path / "x.tif").write_bytes(damaged)
    for source in (tmp_path / "x.tif", BytesIO(damaged)):
        with pytest.raises(UnusableFileError) as raised:
            pictures.decode(source, GREY)
        assert raised.value.words == "damaged: its header cannot be read"


def test_warnings_as_errors_reject_no_picture(tmp_path: Path) -> None:
    picture = Image.new("P", (8, 8))
    picture.info["transparency"] = bytes([0, 100, 200])
    picture.save(tmp_path / "x.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pictures.decode(tmp_path / "x.png", InputSpec((3, 8, 8))).shape == (3, 8, 8)


def test_a_picture_with_damaged_exif_data_is_read_as_stored(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(saved("JPEG", exif=b"Exif\0\0II*\0" + b"\xff" * 40))
    assert pictures.decode(tmp_path / "x.jpg", None).shape == (3, 32, 48)


def test_mif1_is_told_apart_by_its_compatible_brands() -> None:
    def box(*brands: bytes) -> bytes:
        content = brands[0] + bytes(4) + b"".join(brands[1:])
        return struct.pack(">I", len(content) + 8) + b"ftyp" + content

    assert formats.find(box(b"mif1", b"heic")) is formats.HEIF
    assert formats.find(box(b"mif1", b"avif", b"miaf")) is formats.AVIF
    assert formats.find(box(b"isom", b"mp41")) == "video is not read"
