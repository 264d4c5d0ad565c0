"""A device's images come from a folder per class; unusable files are skipped and counted, or rejected with one line."""

import os
import socket
import subprocess
import sys
import types
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image, ImageOps

from edge_fl.data import datasets, grouping
from edge_fl.data.class_names import OUTSIDE
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import ConfigError, DataError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import UnusableFileError, pictures
from edge_fl.modalities.limits import FileLimits
from edge_fl_devices.config import DeviceConfig, convert
from edge_fl_devices.data import load, record, sources
from edge_fl_devices.data.load import SampleStream, collect
from edge_fl_devices.data.record import DataReport
from edge_fl_devices.data.spec import UNKNOWN, DataSpec
from edge_fl_devices.doctor import status
from tests.devices.loading import loaded

DIGITS = datasets.load("digits", Path("nowhere"))
GREY = InputSpec((1, 8, 8))
PETS = ("cat", "dog")


def picture(path: Path, value: int, *, size: tuple[int, int] = (8, 8), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def pets(root: Path, n: int = 4) -> Path:
    """n cats of the grey levels 0.., n dogs of 100.."""
    for i in range(n):
        picture(root / "cat" / f"{i}.png", i)
        picture(root / "dog" / f"{i}.png", 100 + i)
    return root


def levels(samples: Samples) -> list[int]:
    return sorted(samples.x[:, 0, 0, 0].tolist())


def everything(found: ClientData) -> list[int]:
    return sorted(levels(found.train) + levels(found.validation) + levels(found.test))


def test_a_folder_per_class_becomes_labelled_images(tmp_path: Path) -> None:
    found, report = loaded(str(pets(tmp_path)), DataSpec(PETS, GREY))
    assert everything(found) == [0, 1, 2, 3, 100, 101, 102, 103]
    for part in (found.train, found.validation, found.test):
        assert ((part.x[:, 0, 0, 0] >= 100) == part.y).all()
    assert report.samples_per_class == (4, 4)
    assert (report.samples, report.one_class, report.notes) == (8, False, [])


def test_labels_follow_the_class_list_not_the_folders_order(tmp_path: Path) -> None:
    found, _ = loaded(f"folder:{pets(tmp_path)}", DataSpec(("dog", "bird", "cat"), GREY))
    assert set(found.train.y[found.train.x[:, 0, 0, 0] < 100]) == {2}


def test_files_that_cannot_be_used_are_skipped_and_counted(tmp_path: Path) -> None:
    pets(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    whole = (tmp_path / "cat" / "1.png").read_bytes()
    (tmp_path / "dog" / "cut.png").write_bytes(whole[:-30])
    (tmp_path / "dog" / "page.jpg").write_text("<html>")
    picture(tmp_path / "zebra" / "0.png", 200)
    picture(tmp_path / "lost.png", 200)
    (tmp_path / "cat" / ".DS_Store").write_text("hidden files are ignored")
    picture(tmp_path / ".thumbnails" / "0.png", 200)
    picture(tmp_path / "cat" / ".thumbnails" / "0.png", 200)
    found, report = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert everything(found) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert report.skipped == {
        "not a picture file": 1,
        "damaged": 1,
        "truncated": 1,
        "content is not a picture": 1,
        "in a folder that is not in the class list": 1,
        "not directly in a class folder": 1,
    }
    assert not any("broken" in note for note in report.notes)
    local = " ".join(report.local_notes)
    assert "1 damaged: cat/broken.png (" in local and "1 truncated: dog/cut.png" in local


def test_a_misspelt_folder_is_named_here_and_only_its_nearest_class_is_sent(tmp_path: Path) -> None:
    pets(tmp_path)
    for number in range(3):
        picture(tmp_path / "Dogg" / f"{number}.png", 200)
    _, report = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert report.local_notes == ["folder 'Dogg' is not a class: did you mean 'dog'?"]
    assert report.notes == [f"3 files skipped: {OUTSIDE}, nearest 'dog'"]


def test_pictures_are_resized_and_recoloured_to_what_the_extractor_takes(tmp_path: Path) -> None:
    for i in range(3):
        picture(tmp_path / "cat" / f"{i}.jpg", 255, size=(20, 12), mode="RGB")
    found, _ = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert found.train.shape == (1, 8, 8)
    found, _ = loaded(str(tmp_path), DataSpec(PETS, InputSpec((3, 4, 6))))
    assert found.train.shape == (3, 4, 6)


def test_a_camera_held_sideways_still_gives_upright_pictures(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for i in range(2):
        image = Image.new("L", (6, 4), i)
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(tmp_path / "cat" / f"{i}.png", exif=exif)
    assert loaded(str(tmp_path))[0].train.shape == (1, 6, 4)


PEAK = """
import sys
from tests.devices.loading import loaded
from edge_fl_devices.data.spec import DataSpec
from edge_fl.inputs import InputSpec
print(loaded(sys.argv[1], DataSpec(("cat", "dog"), InputSpec((3, 32, 32))))[1].samples)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_photos_of_a_phone_are_read_in_little_memory(tmp_path: Path) -> None:
    rough = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8))
    photo = rough.resize((4000, 3000), Image.Resampling.BICUBIC)
    exif = photo.getexif()
    exif[0x0112] = 6  # held upright
    (tmp_path / "cat").mkdir()
    for name in ("1.jpg", "2.jpg", "3.jpg"):
        photo.save(tmp_path / "cat" / name, exif=exif)
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    samples, peak_kb = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert samples == "3" and int(peak_kb) < 100 * 1024
    upright = photo.transpose(Image.Transpose.ROTATE_270)
    exact = np.asarray(ImageOps.fit(upright, (32, 32), Image.Resampling.LANCZOS))
    found = pictures.decode(tmp_path / "cat/1.jpg", InputSpec((3, 32, 32))).transpose(1, 2, 0)
    assert np.abs(found.astype(int) - exact).mean() < 2


def test_sixteen_bit_pictures_keep_their_shades(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for i in range(2):
        Image.fromarray(np.full((8, 8), 0x8000 + i, np.uint16)).save(tmp_path / "cat" / f"{i}.png")
    assert set(everything(loaded(str(tmp_path), DataSpec(PETS, GREY))[0])) == {0x80}


def test_before_the_first_release_the_folder_itself_says_what_there_is(tmp_path: Path) -> None:
    found, report = loaded(str(pets(tmp_path)))
    assert report.classes == PETS
    assert found.train.shape == (1, 8, 8)
    picture(tmp_path / "dog" / "wide.png", 0, size=(9, 8))
    with pytest.raises(DataError, match=r"wide\.png: .*expected one shape"):
        loaded(str(tmp_path))


def test_before_the_first_release_pictures_of_any_size_are_counted_without_their_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets(tmp_path)
    picture(tmp_path / "dog" / "wide.png", 0, size=(9, 8))
    (tmp_path / "cat" / "broken.png").write_bytes(b"half")
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    report = load.count_for(DeviceConfig("pi-1", str(tmp_path)), UNKNOWN)
    assert (report.classes, report.samples_per_class, report.samples) == (PETS, (4, 5), 9)
    assert report.skipped == {"content is not a picture": 1}


def test_a_count_needs_two_pictures_too(tmp_path: Path) -> None:
    config = DeviceConfig("pi-1", str(tmp_path))
    with pytest.raises(DataError, match=r"no usable file \(no files\); expected files in a folder per class"):
        load.count_for(config, UNKNOWN)  # the first release may be one of recordings
    picture(tmp_path / "dog" / "0.png", 0)
    with pytest.raises(DataError, match="1 usable picture, expected 2 or more"):
        load.count_for(config, UNKNOWN)


def test_fifos_sockets_and_devices_are_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets(tmp_path)
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    (tmp_path / "dog" / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "dog" / "gone.png").symlink_to("nowhere.png")
    monkeypatch.chdir(tmp_path / "dog")  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.png")
    skipped = {"not a regular file": 3, "a broken link": 1}
    assert loaded(str(tmp_path), DataSpec(PETS, GREY))[1].skipped == skipped
    assert load.count_for(DeviceConfig("pi-1", str(tmp_path)), UNKNOWN).skipped == skipped
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match=r"pipe\.npz: not a regular file"):
        loaded(str(tmp_path / "pipe.npz"))


def test_a_folder_that_cannot_be_listed_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pets(tmp_path)
    list_folder = os.scandir

    def scandir(path: str | Path) -> object:
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    _, report = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert report.skipped == {"unreadable folder": 1} and report.samples_per_class == (4, 0)
    assert "1 file skipped: unreadable folder" in report.notes


def test_a_misspelt_folder_names_the_nearest_class(tmp_path: Path) -> None:
    picture(tmp_path / "DOG" / "0.png", 0)
    picture(tmp_path / "cats" / "0.png", 0)
    picture(tmp_path / "zebra" / "0.png", 0)
    with pytest.raises(DataError, match="folder 'DOG' is not a class: did you mean 'dog'"):
        loaded(str(tmp_path), DataSpec(PETS, GREY))
    pets(tmp_path)
    _, report = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert report.hints == tuple(
        f"folder {name!r} is not a class: did you mean {near!r}?"
        for name, near in (("DOG", "dog"), ("cats", "cat"))
    )
    assert not any("cats" in note for note in report.notes)


def test_a_picture_in_the_folders_of_two_classes_is_named_and_counts_once(tmp_path: Path) -> None:
    source = pets(tmp_path / "images")
    (source / "dog" / "twin.png").write_bytes((source / "cat" / "2.png").read_bytes())
    (source / "cat" / "again.png").write_bytes(
        (source / "cat" / "2.png").read_bytes()
    )  # only a near duplicate
    config = DeviceConfig("pi-1", str(source), folder=str(tmp_path))
    for _ in range(2):  # the second time the pictures are known, not decoded
        data, report = load.load_for(config, DataSpec(PETS, GREY))
        assert report.samples_per_class == (5, 4) and everything(data)[:6] == [0, 1, 2, 2, 3, 100]
        (line,) = [line for line in report.local_notes if "another class" in line]
        assert line.endswith(": dog/twin.png (the same as cat/2.png, which counts)")
        assert not any("twin" in note for note in report.notes)
    assert load.count_for(config, DataSpec(PETS, GREY)).samples_per_class == (5, 4)
    rows = {row["what"]: row["value"] for row in status.read(tmp_path)}
    assert "dog/twin.png (the same as cat/2.png" in str(rows["skipped files"])


def test_a_class_that_lost_its_images_is_reported_until_it_has_some(tmp_path: Path) -> None:
    source = pets(tmp_path / "images")
    config = DeviceConfig("pi-1", str(source), folder=str(tmp_path))
    spec = DataSpec(PETS, GREY)
    assert load.count_for(config, UNKNOWN).disappeared == ()
    (source / "dog").rename(source / "cow")
    for _ in range(2):
        report = load.load_for(config, spec)[1]
        assert report.disappeared == ("dog",)
        assert "1 classes had pictures before and have none now" in report.notes
    assert load.count_for(replace(config, classes=["cat"]), spec).disappeared == ()
    (source / "cow").rename(source / "dog")
    assert load.count_for(config, spec).disappeared == ()


def test_a_failed_count_is_recorded_until_the_next_one_succeeds(tmp_path: Path) -> None:
    source = tmp_path / "images"
    config = DeviceConfig("pi-1", str(source), folder=str(tmp_path))
    with pytest.raises(DataError):
        load.count_for(config, UNKNOWN)
    assert record.read(tmp_path).why == "no_data" and "expected a folder" in record.read(tmp_path).problem
    pets(source)
    load.count_for(config, UNKNOWN)
    assert record.read(tmp_path) == record.DataRecord(DataReport(("cat", "dog"), (4, 4), {}))


def test_jfif_and_mpo_pictures_are_read(tmp_path: Path) -> None:
    for name in ("a.jfif", "b.JFIF", "c.mpo"):
        picture(tmp_path / "cat" / "x.jpg", 80)
        (tmp_path / "cat" / "x.jpg").rename(tmp_path / "cat" / name)
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (200, 10)]
    frames[0].save(tmp_path / "cat" / "c.mpo", "MPO", save_all=True, append_images=frames[1:])
    _, report = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert report.samples == 3 and not report.skipped
    assert pictures.decode(tmp_path / "cat" / "c.mpo", InputSpec((3, 8, 8)))[0, 0, 0] > 190


def test_float_pictures_are_scaled_or_rejected_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for name, level in (("a", 0.5), ("b", 1.0), ("high", 200.0), ("nan", np.nan)):
        Image.fromarray(np.full((8, 8), level, np.float32)).save(tmp_path / "cat" / f"{name}.tif")
    found, report = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert everything(found) == [128, 255]
    assert report.skipped == {"floating-point pixels outside 0..1: store them as 8 or 16 bits": 2}


HEIC_START = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic"


def test_heic_without_its_decoder_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    pets(tmp_path)
    for name in ("phone.heic", "renamed.jpg"):
        (tmp_path / "cat" / name).write_bytes(HEIC_START)
    _, report = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert report.skipped == {"HEIC needs pip install 'edge-fl[heic]'": 2}
    with pytest.raises(UnusableFileError, match=r"edge-fl\[heic\]"):
        pictures.decode(BytesIO(HEIC_START), GREY)


def test_heic_is_read_with_its_decoder(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    heif.from_pillow(Image.new("RGB", (64, 48), (200, 0, 0))).save(tmp_path / "x.heic")
    assert pictures.decode(tmp_path / "x.heic", InputSpec((3, 8, 8))).shape == (3, 8, 8)
    assert pictures.decode(tmp_path / "x.heic", None)[0].mean() > 180
    (tmp_path / "x.heic").write_bytes(HEIC_START)
    with pytest.raises(UnusableFileError, match="damaged"):
        pictures.check(tmp_path / "x.heic")


def test_an_empty_source_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable picture \(no files\); expected pictures in cat, dog"):
        loaded(str(tmp_path), DataSpec(PETS, GREY))
    picture(tmp_path / "zebra" / "0.png", 0)
    with pytest.raises(DataError, match="1 in a folder that is not in the class list"):
        loaded(str(tmp_path), DataSpec(PETS, GREY))
    picture(tmp_path / "cat" / "0.png", 0)
    with pytest.raises(DataError, match="1 usable sample, expected 2 or more"):
        loaded(str(tmp_path), DataSpec(PETS, GREY))


def test_one_class_is_allowed_and_flagged(tmp_path: Path) -> None:
    for i in range(3):
        picture(tmp_path / "dog" / f"{i}.png", i)
    _, report = loaded(str(tmp_path), DataSpec(PETS, GREY))
    assert report.one_class
    assert report.notes == ["one_class"]
    assert report.samples_per_class == (0, 3)


def test_limits_hold(tmp_path: Path) -> None:
    pets(tmp_path)
    with pytest.raises(DataError, match="more than 3 pictures"):
        loaded(str(tmp_path), DataSpec(PETS, GREY, limits=FileLimits(max_samples=3)))
    for limits in (FileLimits(max_pixels=63), FileLimits(max_decoding_bytes=63)):
        with pytest.raises(DataError, match="8 too large for this board"):
            loaded(str(tmp_path), DataSpec(PETS, GREY, limits=limits))


def test_an_extractor_of_other_data_than_pictures_is_rejected(tmp_path: Path) -> None:
    series = InputSpec((9, 128), axes="CT", dtype="float32", rate=50.0, hop=64)
    with pytest.raises(
        DataError, match=r"files are pictures \(picture\), but the release takes windows \(series\)"
    ):
        loaded(str(pets(tmp_path)), DataSpec(PETS, series))


@pytest.mark.parametrize("source", ["nowhere", "foldr:x", "npz:nowhere.npz", "folder:nowhere", "nowhere.npz"])
def test_a_source_that_is_not_there_is_rejected(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"nothing was changed"):
        loaded(source)


def dim(root: Path, bits: int = 12) -> Path:
    """Cats and dogs whose brightness differs by a third of the range, in 16-bit files that use `bits`."""
    for i in range(6):
        for name, level in (("cat", 2 / 3), ("dog", 1 / 3)):
            (root / name).mkdir(parents=True, exist_ok=True)
            pixels = np.full((8, 8), round(level * 2**bits) + i, np.uint16)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def test_pictures_of_12_bits_are_scaled_by_the_range_of_their_folder_and_remarked(tmp_path: Path) -> None:
    config = DeviceConfig("pi-1", str(dim(tmp_path / "images")), folder=str(tmp_path))
    stream = load.streamer(config)(PETS, GREY)
    found = collect(stream)
    assert set(everything(found)) == {170, 171, 85} and stream.bits == 12
    assert "16-bit pictures use 12 bits: scaled by 16" in stream.report.notes
    assert record.read(tmp_path).report.notes == stream.report.notes
    assert {row["what"]: row["value"] for row in status.read(tmp_path)}["16-bit pictures"]


def test_the_settings_say_how_many_bits_are_used(tmp_path: Path) -> None:
    config = DeviceConfig("pi-1", str(dim(tmp_path / "images", 10)), folder=str(tmp_path))
    for bits, brightest in (("auto", 172), (12, 43), (16, 2)):
        found, _ = load.load_for(replace(config, bits=bits), DataSpec(PETS, GREY))
        assert max(everything(found)) == brightest
    with pytest.raises(ConfigError, match="bits"):
        convert({"id": "pi-1", "data": "x", "bits": 11}, "device.toml")


def test_an_npz_or_a_function_may_say_which_images_belong_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = DIGITS.samples.x[:12], np.arange(12) % 2
    given = np.array(["a", "a", "b", "b", "", "", "c", "d", "e", "a", "f", "g"])
    np.savez(tmp_path / "data.npz", x=x, y=y, groups=given)
    stream = SampleStream(sources.read(f"npz:{tmp_path / 'data.npz'}", DataSpec(keep=11)))
    list(stream)
    assert grouping.numbers(stream.groups, 11).tolist() == [0, 1, 1, 2, 3, 4, 5, 6, 0, 7, 8]
    for part in stream.sets:
        assert not {0, 8} & set(part.tolist()) or {0, 8} <= set(part.tolist())
    np.savez(
        tmp_path / "split.npz",
        x_train=x,
        y_train=y,
        x_test=DIGITS.samples.x[20:23],
        y_test=y[:3],
        groups_test=[7, 7, 8],
    )
    stream = SampleStream(sources.read(f"npz:{tmp_path / 'split.npz'}", DataSpec()))
    list(stream)
    assert stream.groups.tolist() == [*range(12), 12, 12, 13]
    module = types.ModuleType("of_groups")
    module.given = lambda: (x, y, list(range(3)) * 4)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "of_groups", module)
    stream = SampleStream(sources.read("python:of_groups:given", DataSpec()))
    list(stream)
    assert stream.groups.tolist() == [0, 1, 2] * 4


@pytest.mark.parametrize("wrong", [np.zeros(11, int), np.zeros(12), np.zeros((12, 1), int)])
def test_groups_that_do_not_fit_the_images_are_an_error(tmp_path: Path, wrong: np.ndarray) -> None:
    np.savez(tmp_path / "data.npz", x=DIGITS.samples.x[:12], y=np.arange(12) % 2, groups=wrong)
    with pytest.raises(DataError, match="expected 12 whole numbers or strings"):
        sources.read(f"npz:{tmp_path / 'data.npz'}", DataSpec())


def test_the_owner_reads_each_remark_once_and_with_the_names() -> None:
    report = DataReport(
        ("cat", "dog"),
        (2, 0),
        {"truncated": 1, "in no class": 2},
        disappeared=("dog",),
        names={"truncated": ("cat/a.jpg",)},
        scenes=1,
        single=("cat",),
    )
    assert report.owner_notes == [*report.local_notes, "2 files skipped: in no class", "one_class"]
    assert (
        "1 file skipped: truncated" in report.notes
        and "skipped: 1 truncated: cat/a.jpg" in report.owner_notes
    )
