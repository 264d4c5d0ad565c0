"""A device works with its own classes and with as many images as it is allowed."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl.errors import DataError
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data.load import load_for
from edge_fl_devices.data.spec import UNKNOWN
from tests.devices.images import picture
from tests.devices.loading import loaded


def config_for(path: Path, **settings: object) -> DeviceConfig:
    return DeviceConfig("pi-01", str(path), **settings)  # type: ignore[arg-type]


def test_a_device_keeps_to_its_classes(tmp_path: Path) -> None:
    for name in "abc":
        for number in range(4):
            picture(tmp_path / name / f"{name}{number}.png")
    report = load_for(config_for(tmp_path, classes=["a", "c"]), UNKNOWN)[1]
    assert report.samples_per_class == (4, 0, 4) and report.skipped == {
        "of a class that this device leaves out": 4
    }
    with pytest.raises(DataError, match="no usable picture"):
        load_for(config_for(tmp_path, classes=["z"]), UNKNOWN)


def test_a_bounded_device_works_with_the_newest_images_or_with_a_fair_sample(tmp_path: Path) -> None:
    y = np.arange(100) % 2
    x = np.random.default_rng(0).integers(0, 256, (100, 1, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    np.savez(tmp_path / "more.npz", x=np.concatenate([x, x[:1] ^ 255]), y=np.append(y, 0))

    def kept(name: str, policy: str) -> set[bytes]:
        data, _ = load_for(config_for(tmp_path / name, keep=20, policy=policy), UNKNOWN)
        return {image.tobytes() for part in (data.train, data.validation, data.test) for image in part.x}

    assert kept("all.npz", "newest") == {image.tobytes() for image in x[-20:]}
    fair = kept("all.npz", "reservoir")
    assert len(fair) == 20 and fair != kept("all.npz", "newest")
    assert len(fair - kept("more.npz", "reservoir")) <= 1  # one more image moves at most one out


def test_of_a_folder_only_the_kept_pictures_are_read(tmp_path: Path) -> None:
    for number in range(12):
        picture(tmp_path / "ab"[number % 2] / f"{number}.png")
    for policy in ("newest", "reservoir"):
        _, report = load_for(config_for(tmp_path, keep=6, policy=policy), UNKNOWN)
        assert report.samples == 6
    assert loaded(str(tmp_path))[1].samples == 12
