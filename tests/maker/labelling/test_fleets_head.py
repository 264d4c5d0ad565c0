"""With a release that has a fleet's head the label page predicts before the first label, and records what it guessed before each one."""

import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl.blob import describe, split
from edge_fl.heads import HeadPlan, fleet
from edge_fl.heads.wording import NOT_PERSONAL, OWN, WITH_LABELS
from edge_fl.modalities import pictures
from edge_fl.wire import tensors
from edge_fl.wire.messages import Assignment
from edge_fl_devices.agent.effects import Fit
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import first_guesses
from edge_fl_devices.data.load import streamer
from edge_fl_devices.doctor import status
from edge_fl_devices.features.extractor import Extractor, runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_maker.upkeep.device_folder import plan_reset, reset
from tests.browsing import visiting
from tests.devices.graphs import on_disk
from tests.maker.labelling.fruit import CAPTURE, CLASSES, INPUT, Desk, desk, fill, fruit, manifest

LABEL_S = 3.0
"""From a label to the head that predicts, on a machine with two cores."""


def fleets_head(extractor: Extractor, per_class: int = 12) -> bytes:
    """The extra of a fleet that has seen other fruits of every class."""
    y = np.repeat(np.arange(len(CLASSES)), per_class)
    seeds = 5000 + np.arange(len(y))
    drawn = zip(y.tolist(), seeds.tolist(), strict=True)
    images = [pictures.decode(BytesIO(fruit(label, seed)), INPUT) for label, seed in drawn]
    z = extractor.features(np.stack(images)).astype(np.float64)
    means = np.stack([z[y == label].mean(axis=0) for label in range(len(CLASSES))])
    weight, bias = fleet.discriminant(means, np.cov((z - means[y]).T))
    head = {"weight": weight.astype(np.float32), "bias": bias.astype(np.float32)}
    return tensors.pack({fleet.FLEET: head})


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    """A device with a release that has a fleet's head; it has no label."""
    home = tmp_path / "pi"
    plain, payload = manifest()
    extra = fleets_head(Extractor(on_disk(tmp_path, payload), plain))
    plan = HeadPlan(fleet=fleet.FLEET)
    release, payload = manifest(heads=plan, extras={fleet.FLEET: describe(extra, 65536)})
    slots = Slots(home / "release")
    slots.prepare(release)
    for blob, content in ((release.extractor, payload), (release.extras[fleet.FLEET], extra)):
        for index, chunk in enumerate(split(content, blob.chunk_bytes)):
            slots.sink(blob).add(index, bytes(chunk))
    slots.install(release)
    return DeviceConfig("pi", f"folder:{tmp_path / 'images'}", folder=str(home), capture=CAPTURE)


def label(site: Desk, truth: dict[str, str], count: int = 1) -> None:
    for _ in range(count):
        picture = site.session.view("me").item
        assert picture
        site.session.label("me", picture.name, picture.version, truth[picture.name])
        site.learned()


def accuracy(home: Path, labels: NDArray[np.int64], seed: int = 900) -> float:
    """Of the served head on new pictures of these classes."""
    images = [
        pictures.decode(BytesIO(fruit(int(label), seed + row)), INPUT) for row, label in enumerate(labels)
    ]
    found = [name for name, _ in Predictor(home).predict(np.stack(images))]
    return float(np.mean([name == CLASSES[label] for name, label in zip(found, labels, strict=True)]))


@pytest.mark.timed
def test_predictions_appear_before_the_first_label_and_each_label_leads_to_a_head_at_once(
    config: DeviceConfig,
) -> None:
    home, truth = Path(config.folder), fill(config, 5)
    with desk(config) as site:
        view = site.learned()
        assert view.item and view.item.guesses and view.head in fleet.KINDS
        assert (view.head_words, view.accuracy, view.accuracy_words) == (
            NOT_PERSONAL,
            None,
            "not measured yet (0 of 8 scenes: a class counts from its second scene on)",
        )
        assert accuracy(home, np.repeat(np.arange(len(CLASSES)), 8)) > 0.5
        for number in range(1, 10):
            started_s = time.monotonic()
            label(site, truth)
            assert time.monotonic() - started_s < LABEL_S
            view = site.learned()
            assert view.head_words in (WITH_LABELS, OWN) and view.measured == number
            assert (view.accuracy is None) == (number < 8), number
        assert view.fleet is not None and "fleet's head" in view.accuracy_words and view.low < view.high


def lead(home: Path) -> float:
    """How far the bias of apple is above that of the other classes."""
    head = Predictor(home).head
    assert isinstance(head, fleet.Adapted)
    return float(head.bias[0] - head.bias[1:].mean())


def agent_fits(config: DeviceConfig) -> Predictor:
    """What predicts after a fit of the agent."""
    home = Path(config.folder)
    worker = HeadWorker(
        "pi",
        Store(home),
        FitSettings("logistic", cross_validate_below=100),
        loader=LocalFeatureLoader(streamer(config), home),
        fitter=fit_here,
        runtime=runtime,
    )
    worker.boot()
    worker.perform(Fit(Assignment(1, "serve", id="rel-1", release=1), "boot", 0), None)
    found = Predictor(home)
    assert found.immediate is None
    return found


def require_same(page: Predictor, agents: Predictor) -> None:
    """The agent's head is the page's, but for rounding."""
    assert page.immediate
    z = np.random.default_rng(0).normal(size=(50, page.manifest.feature_dim)).astype(np.float32)
    assert np.allclose(agents.head.logits(z), page.head.logits(z), atol=1e-2)


def test_unlabelled_pictures_tell_the_class_shares_of_a_device_without_labels(config: DeviceConfig) -> None:
    """All pictures of the pool are of one class: it becomes more probable, to the agent, too."""
    home = Path(config.folder)
    with desk(config) as site:
        site.learned()
        before = lead(home)
        for number in range(20):
            assert site.session.pool.add(fruit(0, number), f"camera {number}").name
        site.session.learner.look()
        site.learned()
        site.session.learner.look()  # their features are known now
        site.learned()
        assert lead(home) > before + 1
    page = Predictor(home)
    require_same(page, agent_fits(config))


def test_first_guesses_are_kept_with_their_labels_over_a_restart_and_an_undo(config: DeviceConfig) -> None:
    home, truth = Path(config.folder), fill(config, 4)
    with desk(config) as site:
        site.learned()
        expected = list[bool]()
        for _ in range(6):
            picture = site.session.view("me").item
            assert picture and picture.guesses
            expected.append(picture.guesses[0].label == truth[picture.name])
            done = site.session.label("me", picture.name, picture.version, truth[picture.name])
            site.learned()
        totals = site.session.learner.guesses.totals
        assert (totals.guesses, totals.right, totals.compared) == (6, sum(expected), 6)
        site.session.undo("me", done.action)
        assert site.session.learner.guesses.totals.guesses == 5
    content = (home / first_guesses.FILE).read_bytes()
    assert len(content) < 6 * 2 * 100 and b"PNG" not in content
    with desk(config) as site:
        words = site.learned().first_guesses
        assert (
            words == f"first guesses: {sum(expected[:5])} of 5 right; fleet's head " + words.split("head ")[1]
        )
        assert {"what": "label page", "value": words} in status.read(home)
        again = site.session.view("me").item
        assert again
    reset(home, plan_reset(home))
    assert not (home / first_guesses.FILE).exists()


def test_the_first_guess_of_a_label_that_was_undone_stays(tmp_path: Path) -> None:
    """The head may have learned the label in between."""
    guesses = first_guesses.FirstGuesses(tmp_path)
    guesses.add(first_guesses.FirstGuess(b"k", "apple", "plum", "plum", True, 9))
    guesses.undo(b"k")
    guesses.add(first_guesses.FirstGuess(b"k", "apple", "apple", "plum", False, 9))
    assert (guesses.totals.guesses, guesses.totals.right) == (1, 0)
    assert first_guesses.FirstGuesses(tmp_path).totals == guesses.totals


def test_the_record_of_first_guesses_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_guesses, "MOST", 10)
    guesses = first_guesses.FirstGuesses(tmp_path)
    for number in range(25):
        guesses.add(first_guesses.FirstGuess(b"%d" % number, "apple", "apple"))
    found = first_guesses.read(tmp_path)
    assert len(found) <= 10 and b"24" in found and b"0" not in found


def test_every_third_picture_is_drawn_at_random_and_the_agent_weights_as_the_page_does(
    config: DeviceConfig,
) -> None:
    home, truth = Path(config.folder), fill(config, 8)
    with desk(config) as site:
        site.learned()
        label(site, truth, 15)
        rows = site.session.learner.guesses.rows
        assert 4 <= sum(not row.chosen for row in rows.values()) <= 6
        page = Predictor(home)
        assert page.immediate and len(page.calibration.importance) == 15
        view = site.learned()
        said = "on new scenes (80 % interval, from 15)"
        assert view.forecast == page.forecast and (said in view.forecast) == (view.accuracy is not None)
    agents = agent_fits(config)
    require_same(page, agents)
    assert sorted(agents.calibration.importance) == pytest.approx(sorted(page.calibration.importance))
    assert agents.calibration.accuracy == pytest.approx(page.calibration.accuracy)
    low, high = agents.calibration.interval
    assert high - low < 0.6  # one random picture stands for several


def test_labels_that_contradict_the_fleet_are_named(config: DeviceConfig) -> None:
    """What the fleet calls banana is carrot here, and what it calls carrot is banana."""
    truth = fill(config, 6)
    swapped = {"banana": "carrot", "carrot": "banana"}
    named = {name: swapped.get(each, each) for name, each in truth.items()}
    with desk(config) as site:
        site.learned()
        label(site, named, 30)
        until_s = time.monotonic() + 20
        while not (contradiction := site.session.view("me").contradiction) and time.monotonic() < until_s:
            time.sleep(0.1)
        assert contradiction.startswith("labels contradict the fleet's head: most of ")
        assert "'carrot' is 'banana' to it" in contradiction


@pytest.mark.browser
def test_the_page_shows_what_more_labels_are_expected_to_add(browser: Any, config: DeviceConfig) -> None:
    truth = fill(config, 4)
    with desk(config) as site:
        site.learned()
        label(site, truth, 18)
        forecast = site.learned().forecast
        assert forecast.startswith(("20 more labels: ", "enough: 20 more labels"))
        with visiting(browser, site.home, width=1280) as visit:
            visit.go("/label", wait_for="#picture:visible")
            assert f"; Forecast: {forecast}" in visit.page.inner_text("#measured")
