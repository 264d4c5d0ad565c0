"""A picture that ends the process which decodes it is found and skipped by name; one that was there by chance is used."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl_devices.data import decoding_marker, load
from edge_fl_devices.data.decoding_marker import FATAL, DecodingMarker

# Reads a folder with a decoder that ends its process at pictures of 13 x 7 pixels, as often as the file ACCIDENTS allows.
READ = r"""
import signal, sys
from pathlib import Path
from PIL import ImageFile
from edge_fl.inputs import InputSpec
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import load
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.load import collect
load_picture, left = ImageFile.ImageFile.load, Path(sys.argv[3])
def ending(picture):
    if picture.size == (13, 7) and (count := int(left.read_text())):  # raise_signal: in this thread, as a decoder does
        left.write_text(str(count - 1))
        signal.raise_signal(getattr(signal, sys.argv[4]))
    return load_picture(picture)
ImageFile.ImageFile.load = ending
tier = sys.argv[5]
config = DeviceConfig("pi-1", sys.argv[1], folder=sys.argv[2], tier=tier)
if tier == "full":
    reports = []
    CurrentData(config, reports.append)(("cat", "dog"), InputSpec((1, 8, 8)))
    report = reports[0]
else:
    stream = load.streamer(config)(("cat", "dog"), InputSpec((1, 8, 8)))
    collect(stream)
    stream.index.flush()
    report = stream.report
print(report.samples, *report.local_notes)
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(6):
        path = tmp_path / "images" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = (13, 7) if number == 3 else (9, 9)
        Image.fromarray(np.random.default_rng(number).integers(0, 255, size[::-1], np.uint8)).save(path)
    return tmp_path / "images"


def read(images: Path, ending: signal.Signals, tier: str = "head") -> tuple[int, str]:
    home, left = images.parent / "home", images.parent / "left"
    command = [sys.executable, "-c", READ, str(images), str(home), str(left), ending.name, tier]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, -ending), done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("ending", "tier"), [(signal.SIGSEGV, "head"), (signal.SIGKILL, "head"), (signal.SIGSEGV, "full")]
)
def test_a_picture_that_ends_its_process_is_skipped_by_name(
    images: Path, ending: signal.Signals, tier: str
) -> None:
    (images.parent / "left").write_text("99")
    assert [read(images, ending, tier)[0] for _ in range(2)] == [-ending, -ending]
    for _ in range(2):
        assert read(images, ending, tier) == (0, f"5 skipped: 1 {FATAL}: dog/3.png")
    (images.parent / "left").write_text("0")
    (images / "dog" / "3.png").write_bytes((images / "dog" / "3.png").read_bytes())  # changed: tried again
    assert read(images, ending, tier) == (0, "6")


def test_several_fatal_pictures_are_remembered_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding_marker, "MOST_FATAL", 2)
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for path in files:
        path.write_bytes(b"")
        marker = DecodingMarker(tmp_path)
        with marker.of(path, alone=True):
            left = (tmp_path / "decoding").read_bytes()
        marker.close()
        (tmp_path / "decoding").write_bytes(left)  # as if the process had ended there
    marker = DecodingMarker(tmp_path)
    assert [marker.is_fatal(path) for path in files] == [False, True, True]


def test_a_picture_that_was_decoded_when_something_else_ended_the_process_is_used(images: Path) -> None:
    (images.parent / "left").write_text("1")
    assert read(images, signal.SIGSEGV)[0] == -signal.SIGSEGV
    assert read(images, signal.SIGSEGV) == (0, "6")
    assert (images.parent / "home" / load.FEATURES / "decoding").read_bytes()[:1] == b"-"


def test_a_second_process_leaves_the_marker_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"")
    first = DecodingMarker(tmp_path)
    with first.of(path):
        second = DecodingMarker(tmp_path)
        assert not second.suspect and not second.is_fatal(path)
        with second.of(path, alone=True):
            pass
        second.close()
        assert (tmp_path / "decoding").read_bytes()[:1] == b"D"
    first.close()
    assert DecodingMarker(tmp_path / "x.png" / "no folder").suspect == b""
