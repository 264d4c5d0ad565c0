"""A label leads to a new head at once, which predictions use until the agent has fitted."""

import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_fl import heads
from edge_fl.data.grouping import SIDE
from edge_fl.errors import DataError, InputError
from edge_fl.heads.plan import HeadPlan
from edge_fl.modalities import pictures, scaled
from edge_fl.wire.messages import Assignment, Report
from edge_fl_devices.agent.effects import Fit
from edge_fl_devices.agent.outbox import Parcel
from edge_fl_devices.child import KILLS
from edge_fl_devices.data.decoding_marker import FATAL
from edge_fl_devices.data.file_index import Origin
from edge_fl_devices.data.load import streamer
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.feature_rows import FeatureRows, read, read_groups
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.serving.served_model import serving
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store, StoredHead
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_maker.labelling import learner
from edge_fl_maker.labelling.immediate import immediate_kind
from tests.devices.deadly import deadly
from tests.devices.scripted import eventually
from tests.maker.labelling.fruit import CLASSES, INPUT, Desk, desk, device, fill, fruit, install, manifest


def teach(site: Desk, truth: dict[str, str], count: int) -> None:
    """Label pictures as the page offers them."""
    for _ in range(count):
        picture = site.session.view("me").item
        assert picture
        site.session.label("me", picture.name, picture.version, truth[picture.name])


def accuracy(home: Path, per_class: int = 10) -> float:
    """Of `device predict` on new pictures."""
    images = [
        pictures.decode(BytesIO(fruit(label, 900 + number)), INPUT)
        for label, number in np.ndindex(len(CLASSES), per_class)
    ]
    found = [label for label, _ in Predictor(home).predict(np.stack(images))]
    return float(np.mean([name == CLASSES[row // per_class] for row, name in enumerate(found)]))


def agent_fits(site: Desk, samples: int, fit_key: str) -> None:
    """What the agent leaves after a fit on `samples` pictures: here a head that always answers plum."""
    home = Path(site.config.folder)
    current = Slots(home / "release").current()
    assert current
    z, y = np.ones((2, current.manifest.feature_dim), np.float32), np.full(2, CLASSES.index("plum"))
    head = heads.fit(
        "cosine", z, y, len(CLASSES), unit_norm=False, extractor=current.manifest.extractor.sha256
    )
    parcel = Parcel("toy", 1, Report(f"rel-{fit_key}", "head", "boot", samples, {}), 60)
    Store(home).keep_head(StoredHead(head, 1, parcel, fit_key))


def test_labels_lead_to_a_head_that_predictions_use_and_that_survives_a_restart(tmp_path: Path) -> None:
    config = device(tmp_path)
    home, truth = Path(config.folder), fill(config, 8)
    with pytest.raises(InputError):
        Predictor(home)
    with desk(config) as site:
        assert site.request("POST", "/predict", fruit(0, 1))[0] == 503
        assert site.session.view("me").accuracy is None
        teach(site, truth, 10)
        site.learned()
        early = accuracy(home)
        teach(site, truth, 30)
        view = site.learned()
        assert view.measured == 40 and view.accuracy is not None and view.head == "cosine"
        late = accuracy(home)
        assert late > early and late > 0.6
        assert site.request("POST", "/predict", fruit(0, 1))[0] == 200
    assert accuracy(home) == late
    with desk(config) as site:
        assert site.learned().fits == 0 and site.session.view("me").measured == 40
    assert serving(Store(home), Slots(home / "release")) is None  # the agent has no head yet


def test_the_agents_head_replaces_the_immediate_one_until_the_next_label(tmp_path: Path) -> None:
    config = device(tmp_path)
    home, truth = Path(config.folder), fill(config, 4)
    with desk(config) as site:
        teach(site, truth, 12)
        assert site.learned().head == "cosine"
        agent_fits(site, 12, "one")
        site.session.learner.look()
        view = site.learned()
        assert (view.head, view.fits) == ("constant", site.session.learner.progress.fits)
        fits = view.fits
        teach(site, truth, 1)
        assert site.learned().head == "cosine" and Predictor(home).immediate
        agent_fits(site, 12, "two")  # a fit that began before the last label
        site.session.learner.look()
        view = site.learned()
        assert view.head == "cosine" and view.fits > fits + 1
    stored = serving(Store(home), Slots(home / "release"))
    assert stored and stored.stored.fit_key == "two"  # comparisons and reports use the agent's head


def test_revoking_heads_deletes_the_immediate_one(tmp_path: Path) -> None:
    config = device(tmp_path)
    truth = fill(config, 2)
    with desk(config) as site:
        teach(site, truth, 4)
        site.learned()
    Store(Path(config.folder)).revoke()
    with pytest.raises(InputError):
        Predictor(Path(config.folder))


def test_undo_and_a_picture_that_is_damaged(tmp_path: Path) -> None:
    config = device(tmp_path)
    truth = fill(config, 3)
    with desk(config) as site:
        teach(site, truth, 6)
        (site.images / "apple" / "damaged.png").write_bytes(fruit(0, 99)[:300])
        site.session.learner.look()
        name = site.session.view("me").item
        assert name
        done = site.session.label("me", name.name, name.version, truth[name.name])
        assert site.learned().measured <= 7
        view = site.session.undo("me", done.action)
        assert view.item and view.item.name == name.name
        view = site.learned()
        assert view.unlabelled == 12 and not view.problem and view.item and view.item.guesses
        assert "cannot be read: apple/damaged.png (truncated)" in view.remark


def test_a_class_that_the_release_does_not_name_waits_for_one_that_does(tmp_path: Path) -> None:
    config = device(tmp_path)
    home, truth = Path(config.folder), fill(config, 3)
    with desk(config) as site:
        site.session.add_class("me", " quince ")
        teach(site, truth, 6)
        name = site.session.view("me").item
        assert name
        done = site.session.label("me", name.name, name.version, "quince")
        classes = {each.name: each for each in done.view.classes}
        assert classes["quince"].count == 1 and not classes["quince"].learned and classes["plum"].learned
        assert site.learned().measured <= 6
        assert site.session.learner.progress.release == 1
        later, payload = manifest([*CLASSES, "quince"], release=2)
        install(home, later, payload)
        site.session.learner.look()
        view = site.learned()
        assert view.release == 2 and all(each.learned for each in view.classes)
        assert Predictor(home).head.classes == len(CLASSES) + 1


def test_before_the_first_release_labels_are_stored(tmp_path: Path) -> None:
    config = device(tmp_path)
    config = msgspec.structs.replace(config, folder=str(tmp_path / "new"))
    truth = fill(config, 2)
    with desk(config) as site:
        view = site.session.view("me")
        assert (view.release, view.classes) == (0, ())
        for name in CLASSES:
            site.session.add_class("me", name)
        teach(site, truth, 5)
        assert sum(each.count for each in site.session.view("me").classes) == 5
        assert site.learned().unlabelled == 7
        install(tmp_path / "new", *manifest())
        site.session.learner.look()
        assert site.learned().head == "cosine"


def test_a_closed_form_is_fitted_at_once_whatever_the_agent_fits() -> None:
    kinds = {
        kind: immediate_kind(kind, HeadPlan()) for kind in ("logistic", "svm", "auto", "nearest", "cosine")
    }
    assert kinds == dict.fromkeys(kinds, "cosine") | {"nearest": "nearest"}
    assert immediate_kind("logistic", HeadPlan(way="ridge")) == "logistic"
    assert immediate_kind("logistic", HeadPlan(way="tuned")) == "cosine"


def test_feature_rows_survive_a_torn_write_and_drop_what_is_gone(tmp_path: Path) -> None:
    z = scaled(np.random.default_rng(0).integers(0, 256, (700, 3), np.uint8))
    keys = [bytes([number % 256, number // 256]) + bytes(14) for number in range(700)]
    rows = FeatureRows(tmp_path, "a" * 64, 3)
    thumbs = np.random.default_rng(1).integers(0, 256, (350, SIDE**2), np.uint8)
    for number, (key, row) in enumerate(zip(keys, z, strict=True)):
        film = f"film {number}" if number >= 690 else "holiday" * (number >= 680)
        rows.add(
            key, row[None], thumbs[number // 2][None], Origin(60.0 * number, certain=True, recording=film)
        )
    with rows.path.open("ab") as file:
        file.write(b"torn")
    found = rows.find(keys[7])  # a row that another thread is adding looks like this
    assert found is not None and np.array_equal(found[0], z[7])
    rows = FeatureRows(tmp_path, "a" * 64, 3)
    assert np.array_equal(read(rows.path, 3, rows.rows(keys)), z)
    groups = read_groups(rows.path, 3, rows.rows(keys))
    assert groups[0] == groups[1] != groups[2] and len({*groups[:680]}) == 340  # equal thumbnails
    assert len({*groups[680:690]}) == 1 and len({*groups[690:]}) == 5  # one recording; ten others
    size = rows.path.stat().st_size
    rows.keep(keys[:150])
    assert rows.path.stat().st_size == size  # not worth it yet
    rows.keep(keys[5:50])
    assert rows.path.stat().st_size == 45 * size // 700 and keys[0] not in rows
    again = FeatureRows(tmp_path, "a" * 64, 3)
    found = again.find(keys[7])
    assert found is not None and np.array_equal(found[0], z[7])
    FeatureRows(tmp_path, "b" * 64, 3)
    assert not rows.path.exists()


def test_a_device_may_start_often_before_its_first_label(tmp_path: Path) -> None:
    config = device(tmp_path)
    home = Path(config.folder)
    for _ in range(5):
        worker = HeadWorker(
            "pi",
            Store(home),
            FitSettings("logistic"),
            loader=LocalFeatureLoader(streamer(config), home),
            fitter=fit_here,
            runtime=runtime,
        )
        worker.boot()
        with pytest.raises(DataError, match="no such folder"):
            worker.perform(Fit(Assignment(1, "serve", id="rel-1", release=1), "boot", 0), None)
    slots = Slots(home / "release")
    assert slots.current() and not slots.blocked


def test_a_child_that_always_dies_is_asked_a_few_times_and_works_again_after_another_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = deadly(tmp_path / "site", monkeypatch, "labelling.immediate", "SIGSEGV", times=100)
    monkeypatch.setattr(learner, "CHECK_S", 0.01)
    config = device(tmp_path)
    truth = fill(config, 4)
    with desk(config) as site:
        teach(site, truth, 2)
        eventually(
            lambda: 100 - deaths.left >= KILLS and "ended by SIGSEGV" in site.session.view("me").problem
        )
        time.sleep(0.3)  # many looks
        left = deaths.left
        time.sleep(0.3)
        assert deaths.left == left >= 100 - 2 * KILLS and not site.session.view("me").fits
        (tmp_path / "site" / "sitecustomize.py").unlink()
        teach(site, truth, 1)
        eventually(lambda: site.session.view("me").fits and not site.session.view("me").problem)


SERVE = r"""
import signal, sys
from pathlib import Path
import msgspec
from PIL import ImageFile
from edge_fl_devices.config import DeviceConfig
from tests.maker.labelling.fruit import desk
load_picture = ImageFile.ImageFile.load
def ending(picture):
    if picture.size == (13, 7):
        signal.raise_signal(signal.SIGSEGV)
    return load_picture(picture)
ImageFile.ImageFile.load = ending
config = msgspec.json.decode(sys.argv[1].encode(), type=DeviceConfig)
with desk(config) as site:
    view = site.learned()
    print(view.fits, view.measured, view.remark)
"""


def test_a_picture_that_ends_the_service_is_skipped_by_name(tmp_path: Path) -> None:
    config = device(tmp_path)
    for number in range(6):
        path = tmp_path / "images" / CLASSES[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fruit(number % 2, number, (13, 7) if number == 3 else (240, 180)))
    command = [sys.executable, "-c", SERVE, msgspec.json.encode(config).decode()]
    runs = [subprocess.run(command, capture_output=True, text=True) for _ in range(4)]
    assert [run.returncode for run in runs] == [-signal.SIGSEGV, -signal.SIGSEGV, 0, 0], runs[-1].stderr
    fits = [run.stdout.split(maxsplit=2) for run in runs[2:]]
    assert [each[0] for each in fits] == ["1", "0"]  # the head of the first is kept
    assert all(f"cannot be read: banana/3.png ({FATAL})" in each[2] for each in fits)
