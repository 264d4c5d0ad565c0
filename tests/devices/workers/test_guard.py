"""A new model is served only if it is not worse than the old one, and a head is fitted again only for new inputs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.data.samples import ClientData, Samples
from edge_fl.heads import promise as promises
from edge_fl.heads.auto import Choice
from edge_fl.heads.fleet import Fleet
from edge_fl.heads.linear import Constant, Nearest
from edge_fl.heads.plan import HeadPlan
from edge_fl.heads.probability_calibration import UNCALIBRATED
from edge_fl.inputs import InputSpec
from edge_fl.wire.messages import Capability
from edge_fl_devices.agent.events import DataChanged
from edge_fl_devices.child import decode, encode
from edge_fl_devices.features.client_features import ClientFeatures, FeatureSet, LoadedFeatures
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers import comparison
from edge_fl_devices.workers.comparison import is_worse
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, fit_here
from tests.devices import graphs
from tests.devices.scripted import TOPICS, running
from tests.devices.site import FAST, QUICK, Site, big, expected, samples, site_over
from tools.memory_broker import InMemoryBroker, InMemoryTransport

FIRST = ClientData(samples(20, 0), samples(12, 1), samples(10, 2))
MORE = ClientData(samples(30, 3), samples(12, 1), samples(10, 2))


class Counting:
    """Fits in this process and counts the fits."""

    def __init__(self) -> None:
        self.fits: list[str] = []

    def __call__(self, spec: FitSpec, data: FitData) -> Choice:
        self.fits.append(spec.extractor)
        return fit_here(spec, data)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    broker = InMemoryBroker()
    with site_over(partial(InMemoryTransport, broker), tmp_path) as site:
        yield site
    broker.close()


def guarded(
    folder: Path, fitter: Counting, holding: list[ClientData], kind: str = "nearest", below: int = 0
) -> Device:
    loader = LocalFeatureLoader(lambda classes, input: holding[0], folder)
    worker = HeadWorker(
        "pi-01",
        Store(folder),
        FitSettings(kind, cross_validate_below=below),
        loader=loader,
        fitter=fitter,
        runtime=runtime,
        guard=True,
        check=lambda installed: None,
        limits=QUICK,
    )
    return Device("pi-01", TOPICS, Capability("head", "t", "3"), worker, limits=QUICK, fetching=FAST)


def blind() -> bytes:
    """An extractor with constant features."""
    return big(np.zeros_like(graphs.WEIGHTS))


def test_a_worse_model_is_not_served_and_is_reported(site: Site) -> None:
    server, fitter = site.server, Counting()
    site.serve(site.publish())
    with running(guarded(site.home, fitter, [FIRST]), connect=site.connect):
        server.wait_for("pi-01", "rpt")
        server.ack("pi-01", "rel-1")
        site.serve(site.publish(blind(), expected=np.zeros((2, graphs.DIM))))
        report = server.wait_for("pi-01", "rpt", number=2)
        assert (report.release, report.error) == (2, "worse")
        server.ack("pi-01", "rel-2")
        server.wait_for("pi-01", "state", lambda s: (s.release, s.why, s.activity) == (1, "worse", "idle"))
    assert Predictor(site.home).manifest.release == 1 and len(fitter.fits) == 2


BEFORE, AFTER = "personal.test_acc.before", "personal.test_acc.after"


def test_a_release_with_the_extractor_of_an_earlier_one_is_compared_with_the_one_that_it_replaces(
    site: Site,
) -> None:
    server, poor = site.server, {"payload": blind(), "expected": np.zeros((2, graphs.DIM))}
    first = site.publish(**poor)
    site.serve(first)
    with running(guarded(site.home, Counting(), [FIRST]), connect=site.connect):
        low = server.wait_for("pi-01", "rpt").metrics[AFTER]
        server.ack("pi-01", "rel-1")
        site.serve(site.publish())
        found = server.wait_for("pi-01", "rpt", number=2).metrics
        assert found[BEFORE] == low < found[AFTER]
        server.ack("pi-01", "rel-2")
        site.serve(site.publish(**poor))
        assert server.wait_for("pi-01", "rpt", number=3).error == "worse"
        server.ack("pi-01", "rel-3")
        server.wait_for("pi-01", "state", lambda state: (state.release, state.why) == (2, "worse"))
        back = "rel-1-again-1"  # a roll-back succeeds, however the device does with it
        server.assignment("pi-01", "serve", run_id="toy", round=1, id=back, release=first.release)
        report = server.wait_for("pi-01", "rpt", number=4)
        assert (report.id, report.error) == (back, "")
        assert report.metrics[AFTER] == low
        assert report.metrics[BEFORE] == found[AFTER], "that of the release that it leaves"
        assert report.metrics["test_samples.lost"] > report.metrics["test_samples.gained"]


def test_with_few_images_the_head_is_fitted_on_all_and_compared_by_cross_validation(site: Site) -> None:
    server, fitter = site.server, Counting()
    site.serve(site.publish())
    with running(guarded(site.home, fitter, [FIRST], below=43), connect=site.connect):
        first = server.wait_for("pi-01", "rpt")
        assert first.samples == 42
        assert first.metrics["test_samples"] == 42 and first.metrics["personal.test_acc.after"] > 0.8
        server.ack("pi-01", "rel-1")
        site.serve(site.publish(blind(), expected=np.zeros((2, graphs.DIM))))
        assert server.wait_for("pi-01", "rpt", number=2).error == "worse"
        server.ack("pi-01", "rel-2")
        site.serve(site.publish(big(2 * graphs.WEIGHTS), expected=2 * expected()))
        last = server.wait_for("pi-01", "rpt", number=3)
        assert (last.release, last.error, last.metrics["personal.test_acc.before"]) == (
            3, "", first.metrics["personal.test_acc.after"],
        )  # fmt: skip
    (stored,) = [each for each in Store(site.home).heads() if each.release == 3]
    assert len(stored.calibration.right) == 42 and Predictor(site.home).manifest.release == 3


@pytest.mark.parametrize("below", [0, 43])
def test_a_release_for_images_of_another_size_is_compared_too(site: Site, below: int) -> None:
    """With another size the split is another one, so a head is fitted on the served extractor once more."""
    server, small = site.server, InputSpec((1, 2, 2))
    weights = np.ones((4, graphs.DIM), np.float32)
    images = graphs.canary_input(graphs.Canary(seed=5, images=2, features=[]), small).reshape(2, -1)

    def publish(weights: np.ndarray) -> None:
        payload = graphs.graph(weights=weights, input_shape=("n", *small.shape))
        site.serve(site.publish(payload, expected=images @ weights, input=small))

    site.serve(site.publish())
    with running(guarded(site.home, Counting(), [FIRST], below=below), connect=site.connect):
        server.wait_for("pi-01", "rpt")
        server.ack("pi-01", "rel-1")
        publish(0 * weights)
        report = server.wait_for("pi-01", "rpt", number=2)
        assert (report.release, report.error) == (2, "worse")
        server.ack("pi-01", "rel-2")
        publish(weights)
        report = server.wait_for("pi-01", "rpt", number=3)
        assert (report.release, report.error) == (3, "")
        assert {"personal.test_acc.before", "test_samples.lost", "latency_ms.before"} <= report.metrics.keys()


def test_the_default_head_is_the_one_that_the_release_asks_for(site: Site) -> None:
    site.serve(site.publish(heads=HeadPlan("cosine")))
    with running(guarded(site.home, Counting(), [FIRST], "logistic"), connect=site.connect):
        report = site.server.wait_for("pi-01", "rpt")
    assert (report.head, report.samples) == ("cosine", 20)


def test_another_way_of_fitting_on_the_same_extractor_is_compared_by_cross_validation_too(
    site: Site,
) -> None:
    server, fitter = site.server, Counting()
    mixed_up = FIRST.train.y.copy()
    mixed_up[::3] = 1 - mixed_up[::3]  # no head predicts them all, and two kinds not the same ones
    data = ClientData(Samples(FIRST.train.x, mixed_up), FIRST.validation, FIRST.test)
    site.serve(site.publish(heads=HeadPlan("cosine")))
    with running(guarded(site.home, fitter, [data], "logistic", 43), connect=site.connect):
        before = server.wait_for("pi-01", "rpt").metrics[AFTER]
        server.ack("pi-01", "rel-1")
        site.serve(site.publish())
        report = server.wait_for("pi-01", "rpt", number=2)
    values = report.metrics
    lost, gained = values["test_samples.lost"], values["test_samples.gained"]
    assert (report.release, report.error, len(fitter.fits)) == (2, "", 3)
    assert lost + gained > 0
    # How the error of heads without a fleet's head falls: 42 pictures, 40 without one of each class.
    power = np.log(41) / np.log(43)
    assert gained - lost == pytest.approx(42 * ((1 - before) ** power - (1 - values[AFTER]) ** power))


def test_a_head_is_fitted_again_only_when_images_or_extractor_are_new(site: Site) -> None:
    server, fitter, holding = site.server, Counting(), [FIRST]
    site.serve(site.publish())
    device = guarded(site.home, fitter, holding)
    with running(device, connect=site.connect) as runner:
        server.wait_for("pi-01", "rpt")
        server.ack("pi-01", "rel-1")
        runner.deliver(device, DataChanged(device.state.capability))  # announced, but the images are the same
        again = server.wait_for("pi-01", "rpt", lambda report: report.id != "rel-1")
        assert not again.error and len(fitter.fits) == 1
        server.ack("pi-01", again.id)
        holding[0] = MORE
        runner.deliver(device, DataChanged(device.state.capability))
        last = server.wait_for("pi-01", "rpt", lambda report: report.id not in ("rel-1", again.id))
        assert last.samples == 30 and len(fitter.fits) == 2


def test_a_worse_head_on_the_same_release_is_not_served(site: Site) -> None:
    """The guard holds for a release that the device has long served, too."""
    server, holding = site.server, [FIRST]
    site.serve(site.publish())
    device = guarded(site.home, Counting(), holding)
    with running(device, connect=site.connect) as runner:
        served = server.wait_for("pi-01", "rpt").metrics[AFTER]
        server.ack("pi-01", "rel-1")
        wrong = Samples(FIRST.train.x, 1 - FIRST.train.y)
        holding[0] = ClientData(wrong, FIRST.validation, FIRST.test)
        runner.deliver(device, DataChanged(device.state.capability))
        assert server.wait_for("pi-01", "rpt", lambda report: report.id != "rel-1").error == "worse"
    (stored,) = Store(site.home).heads()
    assert stored.parcel.report.metrics[AFTER] == served


@pytest.mark.parametrize(
    ("lost", "won", "worse"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (3, 2, False), (9, 2, True), (2, 9, False)],
)
def test_one_image_never_decides_and_many_do(lost: int, won: int, worse: bool) -> None:
    same = Constant(2, "e", np.array([0]))
    y = np.zeros(lost + won + 4, np.int64)
    z = np.zeros((len(y), 1), np.float32)
    z[:lost] = 1  # only the old head is right here
    z[lost : lost + won] = -1  # only the new one
    old = Nearest(2, "e", np.array([[1.0], [0.0]], np.float32), np.array([0.5, 0], np.float32), *_raw())
    new = Nearest(2, "e", np.array([[-1.0], [0.0]], np.float32), np.array([0.5, 0], np.float32), *_raw())
    nothing = FeatureSet(z[:0], y[:0])
    seen = ClientFeatures(nothing, FeatureSet(z, y), nothing)
    assert (old.predict(z) == y).sum() == lost + 4 and (new.predict(z) == y).sum() == won + 4
    assert is_worse(old, seen, new, seen) is worse and not is_worse(same, seen, same, seen)


def _raw() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(1, np.float32), np.ones(1, np.float32), np.array([0, 1])


def test_features_survive_the_transfer_from_the_child() -> None:
    seen = FeatureSet(np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 1, 1]))
    none = FeatureSet(seen.z[:0], seen.y[:0])
    found = decode(encode(LoadedFeatures((ClientFeatures(seen, seen, none), None), "print")), LoadedFeatures)
    assert found.fingerprint == "print" and found.by_extractor[1] is None and found.by_extractor[0]
    np.testing.assert_array_equal(found.by_extractor[0].train.z, seen.z)
    assert len(found.by_extractor[0].test) == 0


def test_labels_that_fall_out_of_their_sets_are_lost_though_predictions_are_the_same() -> None:
    """A release whose logits are thirty times as large is as accurate, and much too sure."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(400, 3)).astype(np.float32)
    data = FeatureSet(z, (z + 1.2 * rng.normal(size=z.shape)).argmax(axis=1))
    inside = {}
    for times in (1.0, 30.0):
        head = Fleet(
            3, "x", np.eye(3, dtype=np.float32) * np.float32(times), np.zeros(3, np.float32), np.arange(3)
        )
        promise = promises.of(head.logits(z), data.y, np.ones(len(data)), z[:0])
        inside[times] = comparison._inside(head, replace(UNCALIBRATED, promise=promise), data)
        assert np.array_equal(inside[times], promise.inside)
    lost, gained = comparison.changed(inside[1.0], inside[30.0], data.groups)
    assert lost > 40 > 4 * gained
    assert comparison._inside(head, UNCALIBRATED, data) is None


def test_a_report_on_a_second_release_says_what_fell_out_of_prediction_sets(site: Site) -> None:
    server, fitter = site.server, Counting()
    with running(guarded(site.home, fitter, [FIRST], below=100), connect=site.connect):
        site.serve(site.publish())
        assert metrics.PROMISE_LOST not in server.wait_for("pi-01", "rpt").metrics
        server.ack("pi-01", "rel-1")
        server.wait_for("pi-01", "state", lambda s: (s.release, s.activity) == (1, "idle"))
        site.serve(site.publish(big(-graphs.WEIGHTS), expected=-expected()))
        found = server.wait_for("pi-01", "rpt", number=2).metrics
        assert found[metrics.PROMISE_LOST] == found[metrics.PROMISE_GAINED] == 0
