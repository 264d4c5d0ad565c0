"""Pictures get the extractor's size by its declared policy: from files and arrays alike, upright, and in the memory of one picture."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec, Resize
from edge_fl.modalities import pictures

POLICIES: tuple[Resize, ...] = ("crop", "letterbox", "stretch")
MEAN = (0.2, 0.4, 0.6)


def spec(policy: Resize, shape: tuple[int, int, int] = (3, 8, 8)) -> InputSpec:
    return InputSpec(shape, mean=MEAN if shape[0] == 3 else (0.5,), resize=policy)


def noise(height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(height * width).integers(0, 256, (channels, height, width), np.uint8)


def saved(path: Path, image: NDArray[np.uint8], **options: object) -> Path:
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    picture.save(path, **options)  # type: ignore[arg-type]
    return path


def smooth(height: int, width: int) -> NDArray[np.uint8]:
    """Noise with the detail of a photo."""
    rough = Image.fromarray(noise(6, 8).transpose(1, 2, 0))
    return np.asarray(rough.resize((width, height), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def halves(height: int, width: int) -> NDArray[np.uint8]:
    """Red left, blue right."""
    image = np.zeros((3, height, width), np.uint8)
    image[0, :, : width // 2] = image[2, :, width // 2 :] = 255
    return image


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("size", "target"),
    [((8, 8), (8, 8)), ((13, 9), (8, 8)), ((5, 4), (8, 8)), ((227, 227), (96, 96)), ((90, 301), (6, 10))],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_file_and_the_same_picture_in_an_array_give_equal_pixels(
    tmp_path: Path, policy: Resize, size: tuple[int, int], target: tuple[int, int], channels: int
) -> None:
    input, image = spec(policy, (channels, *target)), noise(*size, channels)
    decoded = pictures.decode(saved(tmp_path / "x.png", image), input)
    assert decoded.shape == input.shape
    assert np.array_equal(decoded, pictures.fit(image[None], input)[0])


def test_crop_keeps_the_aspect_ratio_and_the_centre() -> None:
    image = np.zeros((1, 1, 10, 30), np.uint8)
    image[..., 10:20] = 255
    assert (pictures.fit(image, spec("crop", (1, 10, 10))) == 255).all()
    tall = pictures.fit(image.transpose(0, 1, 3, 2), spec("crop", (1, 5, 5)))
    assert tall[0, 0, 1:4].min() > 250


def test_letterbox_keeps_all_of_the_picture_on_the_mean_colour() -> None:
    (boxed,) = pictures.fit(halves(10, 20)[None], spec("letterbox"))
    colour = np.rint(255 * np.array(MEAN))
    assert (boxed[:, [0, 1, 6, 7]] == colour[:, None, None]).all()
    assert (boxed[0, 2:6, :3] > 250).all() and (boxed[2, 2:6, 5:] > 250).all()


def test_stretch_fills_the_input() -> None:
    (stretched,) = pictures.fit(halves(10, 40)[None], spec("stretch"))
    assert (stretched[0, :, :3] > 250).all() and (stretched[2, :, 5:] > 250).all()


def test_one_channel_is_repeated_and_other_numbers_are_rejected() -> None:
    (repeated,) = pictures.fit(noise(9, 9, 1)[None], spec("crop"))
    assert (repeated == repeated[:1]).all()
    with pytest.raises(DataError, match=r"a\.npz: images of \[3, 9, 9\] .*takes \[1, 8, 8\]"):
        pictures.fit(noise(9, 9)[None], spec("crop", (1, 8, 8)), "a.npz")


def test_other_inputs_than_pictures_are_rejected(tmp_path: Path) -> None:
    sequence = InputSpec((9, 128), axes="CT", dtype="float32", rate=50, hop=64)
    path = saved(tmp_path / "x.png", noise(8, 8))
    with pytest.raises(DataError, match=r"x\.png: pictures, but the extractor takes windows \(series\)"):
        pictures.decode(path, sequence)
    with pytest.raises(DataError, match="images: pictures, but the extractor takes windows"):
        pictures.fit(noise(8, 8)[None], sequence)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_policy_applies_to_the_upright_picture(tmp_path: Path, policy: Resize, orientation: int) -> None:
    stored, input = smooth(31, 44), spec(policy, (3, 10, 12))
    exif = Image.Exif()
    exif[pictures.ORIENTATION] = orientation
    found = pictures.decode(saved(tmp_path / "x.png", stored, exif=exif), input)
    upright = {
        1: stored,
        2: stored[:, :, ::-1],
        3: stored[:, ::-1, ::-1],
        4: stored[:, ::-1],
        5: stored.transpose(0, 2, 1),
        6: stored[:, ::-1].transpose(0, 2, 1),
        7: stored[:, ::-1, ::-1].transpose(0, 2, 1),
        8: stored[:, :, ::-1].transpose(0, 2, 1),
    }[orientation]
    expected = pictures.fit(np.ascontiguousarray(upright)[None], input)[0]
    assert np.abs(found.astype(int) - expected).mean() < 1  # rounding between the filter's two passes


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (3, 5000)])
@pytest.mark.parametrize("policy", POLICIES)
def test_extreme_sizes(tmp_path: Path, size: tuple[int, int], policy: Resize) -> None:
    image = noise(*size)
    found = pictures.decode(saved(tmp_path / "x.png", image), spec(policy))
    assert found.shape == (3, 8, 8)
    assert np.array_equal(found, pictures.fit(image[None], spec(policy))[0])


def test_a_reduced_picture_hardly_differs_from_the_exact_filter(tmp_path: Path) -> None:
    rough = Image.fromarray(noise(30, 40).transpose(1, 2, 0)).resize((1600, 1200), Image.Resampling.BICUBIC)
    rough.save(tmp_path / "x.png")
    exact = rough.resize((40, 40), Image.Resampling.LANCZOS, box=(200, 0, 1400, 1200))
    found = pictures.decode(tmp_path / "x.png", spec("crop", (3, 40, 40))).transpose(1, 2, 0)
    assert np.abs(found.astype(int) - np.asarray(exact)).mean() < 2


# not ru_maxrss, which a child inherits from its parent
PEAK = r"""
import re, sys
from pathlib import Path
from edge_fl.modalities import pictures
from edge_fl.inputs import InputSpec
def peak_kb():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
pictures.decode(Path(sys.argv[1]), InputSpec((3, 224, 224)))
idle = peak_kb()
pictures.decode(Path(sys.argv[2]), InputSpec((3, 224, 224)))
print(peak_kb() - idle)
"""
TWELVE_MEGAPIXELS = (4000, 3000)
MOST_MB = 60


def photo() -> Image.Image:
    rough = Image.fromarray(noise(30, 40).transpose(1, 2, 0))
    return rough.resize(TWELVE_MEGAPIXELS, Image.Resampling.BILINEAR)


def save_kind(kind: str, path: Path) -> Path:
    exif, picture = Image.Exif(), photo()
    exif[pictures.ORIENTATION] = 6
    match kind:
        case "jpeg":
            picture.save(path, "JPEG", exif=exif)
        case "progressive":
            picture.save(path, "JPEG", exif=exif, progressive=True)
        case "rgb":
            picture.save(path, "PNG", exif=exif, compress_level=1)
        case "rgba":
            picture.putalpha(200)
            picture.save(path, "PNG", exif=exif, compress_level=1)
        case "palette":
            picture.quantize(64).save(path, "PNG", exif=exif, compress_level=1)
        case "grey16":
            grey = np.asarray(picture.convert("L")).astype(np.uint16) << 8
            Image.fromarray(grey).save(path, "PNG", exif=exif, compress_level=1)
    return path


@pytest.mark.parametrize("kind", ["jpeg", "progressive", "rgb", "rgba", "palette", "grey16"])
def test_twelve_megapixels_are_decoded_in_60_mb(tmp_path: Path, kind: str) -> None:
    small = saved(tmp_path / "small.png", noise(8, 8))
    path = save_kind(kind, tmp_path / kind)
    command = [sys.executable, "-c", PEAK, str(small), str(path)]
    peak_kb = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    sys.stdout.write(f"{kind}: {peak_kb / 1024:.1f} MB\n")
    assert 0 < peak_kb <= MOST_MB * 1024
