"""16-bit pictures have one range from the fit to every prediction: command, HTTP, label page."""

import threading
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from edge_fl.wire.messages import Assignment
from edge_fl_devices.agent.effects import Fit
from edge_fl_devices.config import CaptureConfig, DeviceConfig
from edge_fl_devices.data.load import streamer
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.feature_rows import file_key
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import ImmediateHead, Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_maker.capture.pools import Pool
from edge_fl_maker.current_model import CurrentModel
from edge_fl_maker.http_server import Service
from edge_fl_maker.labelling.learner import Learner
from tests.devices.images import X, Y
from tests.maker.test_http_server import ask, png


def wide(number: int, bits: int = 12) -> bytes:
    """A 16-bit PNG that uses `bits`, with the shades of an 8-bit picture."""
    buffer = BytesIO()
    Image.fromarray(X[number, 0].astype(np.uint16) << bits - 8).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> DeviceConfig:
    for number, label in enumerate(Y):
        path = tmp_path / "images" / "ab"[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wide(number))
    return DeviceConfig("pi-1", f"folder:{tmp_path / 'images'}", folder=str(folder), tier="head")


def fit(config: DeviceConfig) -> None:
    """Fit a head as the agent does."""
    home = Path(config.folder)
    loader = LocalFeatureLoader(streamer(config), home)
    worker = HeadWorker(
        "pi-1", Store(home), FitSettings("logistic"), loader=loader, fitter=fit_here, runtime=runtime
    )
    worker.boot()
    worker.perform(Fit(Assignment(1, "serve", id="rel-1", release=1), "boot", 0), None)


def test_every_prediction_uses_the_range_of_the_fit(config: DeviceConfig, tmp_path: Path) -> None:
    fit(config)
    home = Path(config.folder)
    predictor = Predictor(home)
    assert predictor.bits == 12
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "0.png").write_bytes(wide(0))
    (tmp_path / "album" / "9.png").write_bytes(wide(9, 16))
    skipped: list[str] = []
    (found,) = predictor.read(tmp_path / "album", lambda path, reason: skipped.append(reason))
    assert found.probability == predictor.read_file("8 bits", png(0))[0].probability
    assert found.label == "ab"[Y[0]] and "more than 12 bits" in skipped[0]
    with Service(home) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            assert ask(service, "POST", "/predict", wide(0))[1]["probability"] == found.probability
            assert ask(service, "POST", "/predict", wide(1, 16))[0] == 422
        finally:
            service.stop()
            thread.join(60)


def test_another_range_in_the_settings_is_another_fit(config: DeviceConfig) -> None:
    fit(config)
    (first,) = Store(Path(config.folder)).heads()
    fit(config)
    assert Store(Path(config.folder)).heads()[0].fit_key == first.fit_key
    fit(replace(config, bits=14))
    (second,) = Store(Path(config.folder)).heads()
    assert second.fit_key != first.fit_key and (first.bits, second.bits) == (12, 14)


def test_the_label_page_learns_and_predicts_in_the_same_range(config: DeviceConfig, tmp_path: Path) -> None:
    home = Path(config.folder)
    pool = Pool(home / "unlabelled", CaptureConfig(every_s=0))
    tiff = BytesIO()
    Image.fromarray(np.linspace(0, 4000, 16).reshape(4, 4).astype(np.uint16)).save(tiff, "TIFF")
    added = pool.add(tiff.getvalue(), "a")
    assert added.name.endswith(".png"), added
    assert (
        np.asarray(Image.open(pool.path(added.name))).max() == 4000
    )  # no shade is lost before the range is known
    Store(home).revoke()
    model = CurrentModel(home, optional=True)
    learner = Learner(config, tmp_path / "images", model, pool, threading.Lock())
    learner.start()
    learner.look()
    try:
        for _ in range(600):
            if learner.progress.fits and not learner.is_busy:
                break
            threading.Event().wait(0.05)
        guess = learner.prediction(added.name, file_key(pool.path(added.name)))
        assert guess, learner.progress
        assert Predictor(home).bits == 12
        (found,) = Predictor(home).read_file("x", pool.path(added.name).read_bytes())
        assert found.probability == pytest.approx(guess.probability, rel=1e-5)
    finally:
        learner.stop()
    assert [*(home / "labelling").glob("*-12.rows")]
    immediate = Store(home).immediate_head(Predictor(home).extractor.sha256)
    assert isinstance(immediate, ImmediateHead) and immediate.bits == 12
