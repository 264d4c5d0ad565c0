"""Bursts of nearly equal frames: what a device measures on its own pictures holds on new scenes, or is said to be unknown."""

import time
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from edge_fl import heads, metrics
from edge_fl.heads.probability_calibration import calibrate
from edge_fl.modalities import pictures
from edge_fl.wire.messages import Assignment
from edge_fl_devices.agent.effects import Fit
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record
from edge_fl_devices.data.load import streamer
from edge_fl_devices.doctor import status
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.slots import InstalledRelease, Slots
from edge_fl_devices.storage.store import Store, StoredHead
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_maker.labelling.session import View
from tests.devices import bursts
from tests.maker.labelling.fruit import CLASSES, INPUT, Desk, desk, device


@dataclass(frozen=True)
class Fitted:
    """A device after a fit, and whether the fitted head is right about new scenes, with their probabilities."""

    config: DeviceConfig
    stored: StoredHead
    right: np.ndarray
    answered: np.ndarray

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())


def fitted(tmp_path: Path, scenes: int, count: int, **changes: object) -> Fitted:
    """Fit the head of a device on bursts and try it on 40 new scenes per class."""
    config = device(tmp_path, **changes)
    bursts.write(tmp_path / "images", scenes, count)
    home = Path(config.folder)
    worker = HeadWorker(
        "pi",
        Store(home),
        FitSettings("cosine", calibrate=True, cross_validate_below=config.cross_validate_below),
        loader=LocalFeatureLoader(streamer(config), home),
        fitter=fit_here,
        runtime=runtime,
    )
    worker.boot()
    worker.perform(Fit(Assignment(0, "serve", id="own-1", release=1), "boot", 0), {})
    (stored,) = Store(home).heads()
    labels = np.repeat(np.arange(len(CLASSES)), 40)
    new = np.stack(
        [
            pictures.decode(BytesIO(next(bursts.frames(label, 1000 + row, 1))), INPUT)
            for row, label in enumerate(labels)
        ]
    )
    found = Predictor(home, promise=0.9).predictions(new)
    right = np.array([each.top[0].class_id == label for each, label in zip(found, labels, strict=True)])
    return Fitted(config, stored, right, np.array([each.status == "answered" for each in found]))


def installed(config: DeviceConfig) -> InstalledRelease:
    current = Slots(Path(config.folder) / "release").current()
    assert current
    return current


def first_fit(site: Desk, deadline_s: float = 60.0) -> View:
    """What the label page shows after the first fit."""
    ends_s = time.monotonic() + deadline_s
    while not (view := site.learned()).fits:
        assert time.monotonic() < ends_s, view.problem
        time.sleep(0.01)
    return view


def reported(stored: StoredHead) -> dict[str, float]:
    return dict(stored.parcel.report.metrics)


def test_the_accuracy_of_few_scenes_is_that_of_new_scenes(
    tmp_path: Path,
) -> None:
    found = fitted(tmp_path, 3, 12)
    calibration, values = found.stored.calibration, reported(found.stored)
    shown, (low, high) = calibration.accuracy, calibration.interval
    assert calibration.scenes == 3 * len(CLASSES) == values[metrics.TEST_SAMPLES]
    assert shown == values[metrics.PERSONAL_AFTER] == pytest.approx(found.accuracy, abs=0.1)
    assert low < found.accuracy < high
    report = record.read(Path(found.config.folder)).report
    remark = "216 pictures come from 18 scenes: the accuracy is an estimate from few scenes"
    assert remark in report.notes and remark in report.local_notes


def test_without_groups_the_same_frames_would_show_100_percent(tmp_path: Path) -> None:
    """Accuracy measured without groups, on the same data: it shows that the frames are the trap that they should be."""
    config = device(tmp_path)
    bursts.write(tmp_path / "images", 3, 12)
    stream = streamer(config)(tuple(CLASSES), INPUT)
    pixels = np.concatenate([batch.x for batch in stream]).reshape(len(stream.labels), -1).astype(np.float32)
    fit = partial(heads.fit, "cosine", classes=len(CLASSES), unit_norm=False)
    assert calibrate(fit, pixels, stream.labels).accuracy > 0.98
    assert calibrate(fit, pixels, stream.labels, stream.groups).accuracy < 0.9


def test_answers_on_new_scenes_are_right_as_promised(tmp_path: Path) -> None:
    found = fitted(tmp_path, 5, 10)
    assert found.answered.mean() > 0.3 and found.right[found.answered].mean() >= 0.9 > found.accuracy


def test_a_single_scene_per_class_is_not_measured(tmp_path: Path) -> None:
    found = fitted(tmp_path, 1, 10)
    assert metrics.PERSONAL_AFTER not in reported(found.stored)
    assert not len(found.stored.calibration.right) and found.stored.calibration.interval == (0.0, 1.0)
    report = record.read(Path(found.config.folder)).report
    assert "6 classes have pictures of one scene only: their accuracy cannot be measured" in report.notes
    assert (
        "class 'plum': all pictures are of one scene; its accuracy cannot be measured" in report.local_notes
    )


def test_many_frames_of_few_scenes_are_cross_validated_and_otherwise_no_set_shares_a_scene(
    tmp_path: Path,
) -> None:
    """The limit of `cross_validate_below` is one of scenes."""
    found = fitted(tmp_path, 4, 8, cross_validate_below=100)
    assert found.stored.parcel.report.samples == 4 * 8 * len(CLASSES)
    loader = LocalFeatureLoader(streamer(found.config), Path(found.config.folder))
    (features,) = loader([installed(found.config)]).by_extractor
    assert features and features.scenes == 24
    sets = [set(each.groups.tolist()) for each in (features.train, features.validation, features.test)]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 24 and sets[0] and sets[2]
    values = reported(fitted(tmp_path / "split", 4, 8, cross_validate_below=10).stored)
    assert values[metrics.TEST_SAMPLES] == len(sets[2])


def test_the_label_page_shows_the_accuracy_of_new_scenes_and_says_from_how_few(tmp_path: Path) -> None:
    config = device(tmp_path)
    bursts.write(tmp_path / "images", 3, 5)
    with desk(config) as site:
        view = first_fit(site)
    assert view.measured == 3 * 5 * len(CLASSES) and view.accuracy is not None and view.accuracy < 0.95
    assert view.low < view.accuracy < view.high
    assert view.remark == "90 pictures come from 18 scenes: the accuracy is an estimate from few scenes"


def test_the_label_page_names_the_classes_that_it_cannot_measure(tmp_path: Path) -> None:
    config = device(tmp_path)
    bursts.write(tmp_path / "images", 2, 3)
    for path in (tmp_path / "images" / "plum").glob("1-*"):
        path.unlink()
    with desk(config) as site:
        view = first_fit(site)
    assert view.measured == 30 and view.remark.endswith(
        "not measured, since all pictures are of one scene: plum"
    )


def test_status_names_few_scenes(tmp_path: Path) -> None:
    found = fitted(tmp_path, 1, 4)
    rows = {row["what"]: row["value"] for row in status.read(Path(found.config.folder))}
    assert "24 pictures come from 6 scenes" in str(rows["scenes"]) and "class 'plum'" in str(rows["scenes"])
