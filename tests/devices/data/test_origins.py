"""When pictures were taken, and of which recording they are, is only believed where it can be."""

import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl.data import grouping
from edge_fl.modalities import pictures
from edge_fl_devices.data import file_index
from edge_fl_devices.data.file_index import Origin, grouped

NOON = datetime(2024, 1, 31, 12, tzinfo=UTC).timestamp()


def picture(path: Path, taken: str = "", at_s: float = NOON, size: tuple[int, int] = (40, 30)) -> Path:
    """Write a picture file with this EXIF time and file time."""
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9003] = taken
    Image.fromarray(np.zeros((size[1], size[0]), np.uint8)).save(path, **({"exif": exif} if taken else {}))
    os.utime(path, (at_s, at_s))
    return path


def origin(path: Path) -> Origin:
    return file_index.origin(path, pictures.header(path))


def numbers(*given: Origin) -> list[int]:
    return grouping.numbers(grouped(given), len(given)).tolist()


@pytest.mark.parametrize(
    "name",
    [
        "IMG_20240131_142530.jpg",
        "PXL_20240131_142530123.png",
        "2024-01-31 14.25.30.png",
        "kitchen-2024-01-31T14:25:30.jpg",
        "20240131142530.png",
    ],
)
def test_a_time_in_the_name_is_the_time(tmp_path: Path, name: str) -> None:
    found = origin(picture(tmp_path / name))
    assert found == Origin(NOON + 2 * 3600 + 25 * 60 + 30, certain=True, side=30)


@pytest.mark.parametrize(
    "name", ["0001.png", "1706711130.png", "20249931142530.png", "12345678901234567.png", "3f2a9c.png"]
)
def test_other_numbers_in_a_name_are_none(tmp_path: Path, name: str) -> None:
    assert origin(picture(tmp_path / name)) == Origin(NOON, side=30)


def test_the_exif_time_counts_unless_the_camera_has_no_clock(tmp_path: Path) -> None:
    assert origin(picture(tmp_path / "a.jpg", "2024:01:31 12:00:07")) == Origin(NOON + 7, True, side=30)
    for nonsense in ("0000:00:00 00:00:00", "1980:01:01 00:00:00", "yesterday", "2024:13:31 12:00:07"):
        assert not origin(picture(tmp_path / "a.jpg", nonsense)).certain


def test_damaged_metadata_are_none(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.jpg", "2024:01:31 12:00:07")
    path.write_bytes(path.read_bytes().replace(b"Exif\0\0", b"Exif\0\0\xff\xff", 1)[:-2])
    os.utime(path, (NOON, NOON))
    assert origin(path) == Origin(NOON, side=30)


def test_frames_of_a_recording_belong_together(tmp_path: Path) -> None:
    names = ["yard_frame_0001.png", "yard-frame2.png", "gate_frame_0001.png", "frame_0001.png"]
    found = [origin(picture(tmp_path / name, at_s=NOON + 600 * row)) for row, name in enumerate(names)]
    assert [each.recording for each in found] == ["yard", "yard", "gate", ""]
    assert numbers(*found) == [0, 0, 1, 2]


def test_pictures_of_a_minute_belong_together() -> None:
    certain = [Origin(NOON + each, certain=True) for each in (0, 0.1, 59, 60)]
    assert numbers(*certain) == [0, 0, 0, 1]
    assert numbers(*[Origin(NOON + each) for each in (0, 20, 40, 60)]) == [0, 0, 0, 1]


@pytest.mark.parametrize("apart_s", [0.0, 0.01, 0.5])
def test_the_times_of_copied_files_do_not_make_them_a_group(apart_s: float) -> None:
    copied = [Origin(NOON + apart_s * number) for number in range(30)]
    assert numbers(*copied) == list(range(30))
    assert numbers(*copied[:4]) == list(range(4))
    slowly = [Origin(NOON + 2 * number) for number in range(30)]
    assert numbers(*slowly) == list(range(30))
