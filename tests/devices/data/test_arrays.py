"""A device's images come from an .npz or from a function of its owner; unusable ones are rejected with one line."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl.data import datasets
from edge_fl.errors import DataError
from edge_fl.files import npz
from edge_fl.inputs import InputSpec
from edge_fl_devices.data.spec import DataSpec
from tests.devices.loading import loaded

DIGITS = datasets.load("digits", Path("nowhere"))
GREY = InputSpec((1, 8, 8))
PETS = ("cat", "dog")


def test_an_npz_is_split_or_brings_its_own_split(tmp_path: Path) -> None:
    x, y = DIGITS.samples.x[:40], DIGITS.samples.y[:40]
    npz.write(tmp_path / "mine.npz", {"x": x, "y": y})
    found, report = loaded(str(tmp_path / "mine.npz"), DataSpec(DIGITS.classes, GREY))
    assert report.samples == 40
    sets = (found.train, found.validation, found.test)
    assert len(found.test) > 0 and sum(map(len, sets)) == 40
    assert sorted(map(bytes, np.concatenate([one.x for one in sets]))) == sorted(
        map(bytes, x.reshape(40, -1))
    )
    npz.write(
        tmp_path / "own.npz", {"x_train": x[:30], "y_train": y[:30], "x_test": x[30:], "y_test": y[30:]}
    )
    found, report = loaded(f"npz:{tmp_path / 'own.npz'}", DataSpec(DIGITS.classes, GREY))
    assert (len(found.train), len(found.validation), report.samples) == (30, 0, 40)
    assert np.array_equal(found.test.x, x[30:])


def test_arrays_get_the_size_that_the_extractor_takes_but_not_other_channels(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 9, 12, 3)).astype(np.uint8)
    npz.write(tmp_path / "mine.npz", {"x": x, "y": np.arange(6) % 2})
    for i, image in enumerate(x):
        (tmp_path / "images" / PETS[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "images" / PETS[i % 2] / f"{i}.png")
    spec = DataSpec(PETS, InputSpec((3, 8, 8)))
    archive, _ = loaded(str(tmp_path / "mine.npz"), spec)
    folder, _ = loaded(str(tmp_path / "images"), spec)
    for stored, decoded in zip(
        *((found.train, found.validation, found.test) for found in (archive, folder)), strict=True
    ):
        assert sorted(map(bytes, stored.x)) == sorted(map(bytes, decoded.x))  # also the same split
    with pytest.raises(
        DataError, match=r"mine\.npz: images of \[3, 9, 12\].*, the extractor takes \[1, 8, 8\]"
    ):
        loaded(str(tmp_path / "mine.npz"), DataSpec(PETS, GREY))


def test_a_label_outside_the_class_list_is_rejected_with_file_index_label_and_classes(tmp_path: Path) -> None:
    npz.write(tmp_path / "mine.npz", {"x": np.zeros((3, 8, 8), np.uint8), "y": np.array([0, 1, 7])})
    with pytest.raises(
        DataError, match=r"mine\.npz \(x\): label 7 at index 2 .* outside the 2 classes 0\.\.1 \(cat, dog\)"
    ):
        loaded(str(tmp_path / "mine.npz"), DataSpec(PETS, GREY))


@pytest.mark.parametrize(
    "change",
    [
        {"x": np.zeros((0, 8, 8), np.uint8), "y": np.zeros(0, np.int64)},
        {"z": np.zeros(3)},
        {
            "x_train": np.zeros((3, 8, 8), np.uint8),
            "y_train": np.zeros(3, np.int64),
            "x_test": np.zeros((3, 9, 9), np.uint8),
            "y_test": np.zeros(3, np.int64),
        },
    ],
)
def test_an_npz_without_usable_samples_is_rejected(tmp_path: Path, change: dict[str, np.ndarray]) -> None:
    npz.write(tmp_path / "mine.npz", change)
    with pytest.raises(DataError, match=r"mine\.npz: .*nothing was changed"):
        loaded(str(tmp_path / "mine.npz"), DataSpec(PETS, GREY))


def test_a_function_of_the_user_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sensor.py").write_text(
        "import numpy as np\n"
        "def read(): return np.linspace(0, 1, 128).reshape(2, 8, 8), [0, 1]\n"
        "def fails(): raise OSError('camera is off')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_sensor", None)  # so that it is removed at the end
    del sys.modules["my_sensor"]
    found, report = loaded("python:my_sensor:read", DataSpec(PETS, GREY))
    assert report.samples == 2
    assert found.train.x.dtype == np.uint8
    with pytest.raises(DataError, match="python:my_sensor:fails: OSError: camera is off; expected"):
        loaded("python:my_sensor:fails", DataSpec(PETS, GREY))
    with pytest.raises(DataError, match="has no attribute 'raed'"):
        loaded("python:my_sensor:raed", DataSpec(PETS, GREY))
    with pytest.raises(DataError, match="No module named 'no_such_module'"):
        loaded("python:no_such_module:read", DataSpec(PETS, GREY))
