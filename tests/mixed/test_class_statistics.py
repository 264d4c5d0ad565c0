"""Class statistics from agents to the prior of a release and back to their heads, over a broker."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from edge_fl import heads
from edge_fl.config import ModelConfig, PrivacyConfig
from edge_fl.data.partition import DataConfig
from edge_fl.data.samples import ClientData
from edge_fl.errors import ConfigError, ConnectError
from edge_fl.heads import HeadPlan
from edge_fl.heads.class_statistics import sums as class_statistics
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.class_statistics.sums import ADDED, SURVIVALS, Statistics
from edge_fl.heads.class_statistics.sums import DEVICES as IN_SUMS
from edge_fl.heads.promise import BINS, Promise
from edge_fl.inputs import InputSpec
from edge_fl.methods.contract import steps
from edge_fl.models import build_net
from edge_fl.release.manifests import Manifest
from edge_fl.wire import tensors
from edge_fl.wire.egress import STATISTICS
from edge_fl.wire.messages import SumRequest
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices.agent import events
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.serving.served_model import ServedModel, serving
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers import comparison, head_updates
from edge_fl_devices.workers.class_statistics import StatisticsOffers
from edge_fl_devices.workers.fits import Fits, FitSettings
from edge_fl_devices.workers.full import FullWorker
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_lab.report import page
from edge_fl_server.mqtt.connector import LeaseLimits
from edge_fl_server.mqtt.secure_sums import SumOptions
from edge_fl_server.orchestrate import class_statistics as module
from edge_fl_server.orchestrate.class_statistics import is_as_broadcast, settings_of
from edge_fl_server.orchestrate.serving import FleetAccess, FleetServer
from edge_fl_server.recipes.recipe import BrokerConfig, CohortConfig, Recipe, ReleaseConfig, StatisticsConfig
from edge_fl_server.registry import Database, rollouts
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.coordinator import RolloutCoordinator
from edge_fl_server.release.rollout.stages import rank
from edge_fl_server.runs.results import Results
from tests.edge_fl.methods import toy
from tests.mixed import conftest
from tests.mixed.conftest import Site, data_of
from tests.rejections import rejections_of

DIM = 4
"""Features of the site's network."""
DEVICES = {f"pi-{number}": "logistic" for number in range(6)}


def labelled(samples: int, client: str) -> ClientData:
    """Data of a device with so many labels; more of them contain the fewer ones."""
    data = data_of(client, 40)
    return ClientData(data.train.take(np.arange(samples)), data.validation, data.test)


def run(
    site: Site,
    sums: Any = "plain",
    minimum: int = 5,
    identity: str = "",
    every_s: float = 3600.0,
    **changes: Any,
) -> Results:
    """A run without training that collects statistics."""

    def edit(recipe: Recipe) -> Recipe:
        fields = {
            "source": "none",
            "rounds": 0,
            "input": InputSpec((1, 4, 4)),
            "data": DataConfig(classes=["cat", "dog", "horse"]),
            "cohort": CohortConfig(wait_s=60.0),
            "release": ReleaseConfig(heads=6, wait_s=60.0),
            "statistics": StatisticsConfig(sums, minimum, every_s=every_s),
            "broker": BrokerConfig(identity=identity),
        }
        return replace(recipe, **fields | changes)

    return site.run("fedrep", edit=edit)


def kept(site: Site) -> list[Manifest]:
    return Repository(site.folder / "home" / "main").releases()


def counted(site: Site, manifest: Manifest) -> np.ndarray:
    """Pictures by class in the prior of a release."""
    return prior_of(site, manifest)["count"]


def prior_of(site: Site, manifest: Manifest) -> dict[str, np.ndarray]:
    """The prior of a release."""
    blob = manifest.extras[PRIOR]
    payload = (Repository(site.folder / "home" / "main").artefacts / blob.sha256).read_bytes()
    assert len(payload) <= class_statistics.MAX_BYTES
    return dict(tensors.unpack(payload)[PRIOR])


def labels(devices: Any, samples: int) -> np.ndarray:
    return np.asarray(sum(np.bincount(labelled(samples, name).train.y, minlength=3) for name in devices))


PLAN = HeadPlan("cosine", fleet=PRIOR)


def require_shrunk(site: Site, name: str, served: ServedModel) -> None:
    """The served head is the one with the other devices' part of the prior, not with all of it or with nothing."""
    data = site.data(name)
    loaded = LocalFeatureLoader(lambda classes, input: data, site.folder / name)([served.installed])
    features = loaded.by_extractor[0]
    assert features
    z, y = features.train.z, features.train.y
    extras = head_updates.read_extras(served.installed.extras)
    total = class_statistics.from_arrays(extras[PRIOR])
    rows = class_statistics.uncounted(class_statistics.keys_of(z), y, {})
    others = {PRIOR: total.without(class_statistics.of(z, y, 3, rows)).addends()}
    for given, same in ((others, True), (extras, False), ({}, False)):
        head = heads.fit("cosine", z, y, 3, unit_norm=False, plan=PLAN, extras=given)
        assert np.allclose(head.logits(z), served.stored.head.logits(z), atol=1e-3) is same


def test_labels_of_all_devices_reach_every_head_and_new_labels_are_added(site: Site) -> None:
    site.data = partial(labelled, 12)
    with site.fleet((), DEVICES):
        first = run(site)
        one, two = kept(site)
        assert one.extras == {} and two.extractor == one.extractor and two.heads.way == "cosine"
        assert counted(site, two).tolist() == labels(DEVICES, 12).tolist()
        for name in DEVICES:
            store = Store(site.folder / name)
            served = serving(store, Slots(store.folder / "release"))
            assert served and served.installed.manifest.release == 2
            require_shrunk(site, name, served)
        run(site)  # no device has new labels: the prior stays with the extractor
        assert kept(site)[-1].release == 3
        assert counted(site, kept(site)[-1]).tolist() == labels(DEVICES, 12).tolist()
    record = first.sum()
    length = class_statistics.shape_of(3, one.feature_dim).length
    assert record and record.devices == tuple(DEVICES) and record.pictures == 72
    assert record.bytes_each == 6 * length and not record.masked
    report = page.markdown(page.report(first))
    assert f"72 samples of 6 devices, {record.bytes_each} bytes of each; plain" in report
    lines = [line for line in report.splitlines() if line.startswith("| pi-2 ")]
    assert any(line.endswith(f" {record.bytes_each} |") for line in lines)

    site.data = partial(labelled, 18)
    with site.fleet((), DEVICES):
        run(site)
        assert counted(site, kept(site)[-1]).tolist() == labels(DEVICES, 18).tolist()


def test_a_device_that_uploads_nothing_is_in_no_sum_and_still_gets_the_prior(site: Site, capsys: Any) -> None:
    site.data = partial(labelled, 12)
    some, others = dict(list(DEVICES.items())[:1]), dict(list(DEVICES.items())[1:])
    with site.fleet((), some, share=False), site.fleet((), others):
        results = run(site)
    record = results.sum()
    assert record and record.devices == tuple(others)
    assert counted(site, kept(site)[-1]).tolist() == labels(others, 12).tolist()
    assert Slots(site.folder / "pi-0" / "release").current().manifest.release == 2  # type: ignore[union-attr]
    sent = {row["device"]: int(row["statistics_bytes"]) for row in results.devices()}
    assert sent == {name: record.bytes_each * (name in others) for name in DEVICES}
    assert not (site.folder / "pi-0" / "statistics").exists()
    assert {"sum_chunk"} == {"sum_chunk"} & site.families
    assert not any("/pi-0/up/sum/" in topic for topic, _ in site.packets)


Lie = Callable[[Statistics], Statistics]


def lying(monkeypatch: pytest.MonkeyPatch, bad: str, lie: Lie) -> None:
    """The device `bad` changes its statistics before it sends them."""
    honest = HeadWorker.offer

    def offer(self: HeadWorker, id: str, request: SumRequest) -> Any:
        vector = honest(self, id, request)
        if vector is None or self.device != bad:
            return vector
        return lie(class_statistics.from_flat(vector, class_statistics.shape_of(3, DIM))).flat

    monkeypatch.setattr(HeadWorker, "offer", offer)


def thousands(found: Statistics) -> Statistics:
    """5,000 pictures of each class, those of the last in the opposite direction."""
    sums = found.sums.copy()
    sums[2] *= -5000 / np.linalg.norm(sums[2])
    return Statistics(np.full(3, 5000.0), sums, found.moment, found.centre)


def opposite(found: Statistics) -> Statistics:
    """As many pictures of the first class as a device may send, in the opposite direction."""
    mean = -found.sums[:1] / np.linalg.norm(found.sums[0])
    first, others = np.eye(3)[0], found.left_out(np.array([0]))
    return Statistics(
        others.counts + 32 * first,
        others.sums + 31 * first[:, None] * mean,
        others.moment + 31 * mean.T @ mean,
        others.centre,
    )


def test_a_device_that_sends_what_no_pictures_can_have_is_named_and_left_out(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lying(monkeypatch, "pi-1", thousands)
    site.data = partial(labelled, 12)
    with site.fleet((), DEVICES):
        results = run(site)
        honest = [name for name in DEVICES if name != "pi-1"]
        assert counted(site, kept(site)[-1]).tolist() == labels(honest, 12).tolist()
        for name in DEVICES:
            store = Store(site.folder / name)
            served = serving(store, Slots(store.folder / "release"))
            assert served and served.installed.manifest.release == 2
            if name in honest:
                require_shrunk(site, name, served)
    record = results.sum()
    assert record and record.devices == tuple(honest) and record.pictures == 60
    assert "pi-1: class 0: count 5000 from 1 devices, expected at most 32" in caplog.text
    with closing(Database.open(site.folder / "server" / "registry.sqlite")) as db:
        rejected = rejections_of(db, "main")
    assert [(one.device, one.reason) for one in rejected] == [("pi-1", "statistics")]


def test_a_class_that_differs_from_the_others_is_left_out_and_its_device_subtracts_the_rest(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lying(monkeypatch, "pi-1", opposite)
    site.data = partial(labelled, 12)
    with site.fleet((), DEVICES):
        run(site)
        expected = labels(DEVICES, 12)
        expected[0] -= labels(["pi-1"], 12)[0]
        assert counted(site, kept(site)[-1]).tolist() == expected.tolist()
        for name in DEVICES:
            store = Store(site.folder / name)
            found = serving(store, Slots(store.folder / "release"))
            assert found
            extras = head_updates.read_extras(found.installed.extras)
            own = StatisticsOffers(site.folder / name)
            others = own.without_own(extras, found.installed.manifest.extractor.sha256)[PRIOR]["count"]
            expected = labels([other for other in DEVICES if other not in (name, "pi-1")], 12)
            if name != "pi-1":
                expected[1:] += labels(["pi-1"], 12)[1:]
            assert others.tolist() == expected.tolist()
    assert "class statistics of pi-1: far from those of the other devices, and left out: cat" in caplog.text


@pytest.mark.slow
def test_a_prior_that_a_panel_of_devices_objects_to_is_withdrawn_and_not_inherited(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The devices measure that the prior cost them seven of eight test images."""
    compare = comparison.compare

    def worse(fits: Fits, choice: Any, inputs: Any) -> Any:
        found = compare(fits, choice, inputs)
        return replace_fields(found, lost=7, gained=0) if PRIOR in inputs.manifest.extras else found

    monkeypatch.setattr(comparison, "compare", worse)
    many = {f"pi-{number}": "logistic" for number in range(8)}
    site.data = partial(labelled, 12)
    with site.fleet((), many):
        run(site, release=ReleaseConfig(heads=8, wait_s=60.0))
        with closing(Database.open(site.folder / "server" / "registry.sqlite")) as db:
            record = rollouts.listed(db, "main")[0]
        assert (record.release, record.previous, record.state, record.stage) == (2, 1, "aborted", 0)
        assert "accuracy changed by" in record.reason
        panel = {name for name in many if rank(name, 2) < record.plan["stages"][0]}
        assert len(panel) == 4
        reported = {
            name
            for name in many
            if any(f"/{name}/" in topic and b'"release":2' in payload for topic, payload in site.packets)
        }
        assert reported <= panel
        for name in many:
            store = Store(site.folder / name)
            served = serving(store, Slots(store.folder / "release"))
            assert served and served.installed.manifest.release == 1
        run(site, release=ReleaseConfig(heads=8, wait_s=60.0))
    assert "release 2: aborted in stage 1 of 2 (" in capsys.readouterr().err
    assert {manifest.release: manifest.extras for manifest in kept(site)}[3] == {}


@pytest.mark.slow
def test_a_prior_that_makes_the_fleets_head_worse_is_withdrawn_although_labels_correct_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second sum has the means of other classes; every device with labels serves a head that is as good as before."""
    many = {f"pi-{number}": "logistic" for number in range(8)}
    site.data = partial(labelled, 12)
    with site.fleet((), many):
        run(site, release=ReleaseConfig(heads=8, wait_s=60.0))
    honest = kept(site)[-1]
    assert honest.release == 2 and PRIOR in honest.extras

    def of_other_classes(found: Statistics) -> Statistics:
        counts, sums = np.roll(found.counts, 1), np.roll(found.sums, 1, axis=0)
        return Statistics(counts, sums, found.moment, found.centre)

    for name in many:
        lying(monkeypatch, name, of_other_classes)
    site.data = partial(labelled, 40)
    with site.fleet((), many):
        run(site, release=ReleaseConfig(heads=8, wait_s=60.0))

        def have_the_honest_prior() -> bool:
            stores = [Store(site.folder / name) for name in many]
            found = [serving(store, Slots(store.folder / "release")) for store in stores]
            return all(each and each.installed.manifest.extras == honest.extras for each in found)

        assert eventually(have_the_honest_prior)
    with closing(Database.open(site.folder / "server" / "registry.sqlite")) as db:
        record = rollouts.listed(db, "main")[0]
    assert record.state == "aborted"
    assert record.reason.startswith("fleet: with the fleet's head alone accuracy changed by -")


def test_below_the_minimum_nothing_is_sent_and_nothing_changes(site: Site, capsys: Any) -> None:
    with site.fleet((), DEVICES):
        results = run(site, minimum=7)
    assert [manifest.extras for manifest in kept(site)] == [{}]
    assert results.sum() is None and results.state().state == "completed"
    assert (
        "class statistics: none collected: 6 devices are online, 7 needed; nothing was requested"
        in capsys.readouterr().err
    )
    assert "sum_chunk" not in site.families


@pytest.mark.parametrize("sums", ["masked", "auto"])
def test_masked_sums_give_the_same_prior_and_are_the_normal_way(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sums: str
) -> None:
    folder = with_certificates(tmp_path, monkeypatch, DEVICES)
    site.data = partial(labelled, 12)
    with site.fleet((), DEVICES):
        results = run(site, sums, identity=str(folder / "pi-0"))
    record = results.sum()
    assert record and record.masked and record.devices == tuple(DEVICES)
    assert counted(site, kept(site)[-1]).tolist() == labels(DEVICES, 12).tolist()


def with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: Any) -> Path:
    """Devices of these names have certificates from now on -> the folder with their identities."""
    folder = tmp_path / "ids"
    Authority.make(tmp_path / "ca").bake({name: folder / name for name in names})

    def with_certificate(name: str, *arguments: Any, **options: Any) -> Device:
        return Device(name, *arguments, **options, identity=folder / name)

    monkeypatch.setattr(conftest, "Device", with_certificate)
    return folder


def test_without_certificates_nothing_is_collected_and_nothing_is_said(site: Site, capsys: Any) -> None:
    site.data = partial(labelled, 12)
    with site.fleet((), DEVICES):
        results = run(site, "auto")
    assert [(manifest.extras, manifest.sums) for manifest in kept(site)] == [({}, [])]
    assert results.sum() is None and "class statistics" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "identity", "sums"),
    [
        ("repper", "ids", "masked"),
        ("fedrep", "ids", "masked"),
        ("fedrep", "", "none"),
        ("fedavg", "ids", "none"),
        ("fed-rod", "ids", "none"),
        ("fedavg-all", "ids", "none"),
    ],
)
def test_the_default_is_masked_where_it_is_possible(method: str, identity: str, sums: str) -> None:
    recipe = Recipe(broker=BrokerConfig(identity=identity))
    exports = method != "fedavg-all"
    built = toy.method(method.removesuffix("-all"))
    if not exports:
        built = replace_fields(built)
        object.__setattr__(built, "exports", ())
    assert settings_of(recipe, built).sums == sums


def test_under_differential_privacy_the_default_is_no_sum_without_noise() -> None:
    privacy, identity = PrivacyConfig(noise_multiplier=1.0, clip=1.0), BrokerConfig(identity="ids")
    built = replace_fields(toy.method("fedrep"), privacy=privacy)
    recipe = Recipe(broker=identity, privacy=privacy)
    assert settings_of(recipe, built).sums == "none"
    noisy = StatisticsConfig(clip=1.0, noise_multiplier=4.0)
    assert settings_of(replace(recipe, statistics=noisy), built).sums == "masked"
    assert settings_of(replace(recipe, statistics=StatisticsConfig("masked")), built).sums == "masked"


@pytest.mark.parametrize("masked", [True, False])
def test_devices_of_a_large_fleet_are_in_groups_whose_sums_are_added(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    monkeypatch.setattr(module, "SumOptions", partial(SumOptions, group=5))
    many = {f"pi-{number:02}": "logistic" for number in range(11)}
    folder = with_certificates(tmp_path, monkeypatch, many) if masked else None
    site.data = partial(labelled, 12)
    identity = str(folder / "pi-00") if folder else ""
    with site.fleet((), many):
        everybody = ReleaseConfig(heads=len(many), wait_s=60.0)
        results = run(site, "masked" if masked else "plain", identity=identity, release=everybody)
        for name in many:
            store = Store(site.folder / name)
            served = serving(store, Slots(store.folder / "release"))
            assert served and served.installed.manifest.release == 2
            require_shrunk(site, name, served)
    record = results.sum()
    assert record and sorted(record.devices) == list(many) and record.pictures == 11 * 12
    assert counted(site, kept(site)[-1]).tolist() == labels(many, 12).tolist()
    lists = prior_of(site, kept(site)[-1])
    assert len(lists[ADDED]) == len(set(lists[ADDED].tolist())) == 2 and lists[IN_SUMS].tolist() == [11]


def eventually(condition: Callable[[], bool], deadline_s: float = 60.0) -> bool:
    """Whether it holds before the deadline."""
    until = time.monotonic() + deadline_s
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@contextmanager
def served_between_runs(site: Site, identity: Path) -> Iterator[None]:
    """As `edge-fl server up` does."""
    access = FleetAccess(site.connect, "main", site.folder / "home", identity=identity)
    stopping = threading.Event()
    with closing(Database.open(access.registry)) as db:
        limits = LeaseLimits(settle_s=0.05, lease_s=1.0)
        server = FleetServer(access, db, limits, 1.0)
        thread = threading.Thread(target=server.serve, args=(stopping,))
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join(90)
            assert not thread.is_alive()


def test_how_probable_labels_were_reaches_every_device_once_in_a_masked_sum(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The prior comes first: heads that have it are those of which the fleet learns how wrong their probabilities are."""
    identity = with_certificates(tmp_path, monkeypatch, DEVICES) / "pi-0"
    site.data, site.fit = partial(labelled, 30), FitSettings("", calibrate=True, cross_validate_below=100)
    with site.fleet((), DEVICES):
        run(site, "auto", minimum=6, identity=str(identity))
        _, two = kept(site)
        assert SURVIVALS not in prior_of(site, two)
        before = {name: limits_of(site, name) for name in DEVICES}
        run(site, "auto", minimum=6, identity=str(identity))
        assert (
            "how probable labels were to the heads of 6 devices is known; release 4 says so"
            in capsys.readouterr().err
        )
        rows = prior_of(site, kept(site)[-1])[SURVIVALS]
        assert rows.shape == (2, BINS) and np.allclose(rows.sum(axis=1), 6, atol=1e-3)
        assert np.array_equal(counted(site, kept(site)[-1]), counted(site, two))  # statistics as they were
        for name in DEVICES:
            after = limits_of(site, name)
            assert np.allclose(after.own.sum(axis=1), 1) and not np.array_equal(
                after.masses, before[name].masses
            )
        run(site, "auto", minimum=6, identity=str(identity))  # nothing leaves a second time
        assert np.array_equal(prior_of(site, kept(site)[-1])[SURVIVALS], rows)


def limits_of(site: Site, name: str) -> Promise:
    """What a device's prediction sets follow from."""
    store = Store(site.folder / name)
    served = serving(store, Slots(store.folder / "release"))
    assert served
    return served.stored.calibration.promise


def test_a_server_between_runs_collects_what_is_new_and_releases_only_then(
    site: Site,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum needs all six devices: of five the sixth's pictures would wait until four others have new ones."""
    caplog.set_level(logging.INFO)
    identity = with_certificates(tmp_path, monkeypatch, DEVICES) / "pi-0"
    labelled_now = 8
    site.data = lambda name: labelled(labelled_now, name)
    with site.fleet((), DEVICES):
        run(site, "auto", minimum=6, identity=str(identity), every_s=0.3)
        assert [manifest.release for manifest in kept(site)] == [1, 2]

        def looks() -> int:
            return caplog.text.count("(6 with nothing to add)")

        def refit() -> None:
            for device in site.devices.values():
                device._scheduler.deliver(device, events.DataChanged(device.state.capability))

        with served_between_runs(site, identity):
            assert eventually(lambda: looks() >= 2)
            assert len(kept(site)) == 2  # nothing new: no release
            labelled_now = 12
            refit()
            assert eventually(lambda: len(kept(site)) == 3), caplog.text
            assert counted(site, kept(site)[-1]).tolist() == labels(DEVICES, 12).tolist()
            before = looks()
            assert eventually(lambda: looks() >= before + 2)
            assert len(kept(site)) == 3 and kept(site)[-1].sums == [STATISTICS]
        assert "24 samples" in capsys.readouterr().err

        # a server that is killed between a sum and its release loses the sum, and nothing else
        def killed(*_: Any) -> None:
            raise ConnectError("killed here")

        with monkeypatch.context() as patch:
            patch.setattr(RolloutCoordinator, "extend", killed)
            labelled_now = 18
            refit()
            with served_between_runs(site, identity):
                assert eventually(lambda: "killed here" in capsys.readouterr().err)
                assert len(kept(site)) == 3
        labelled_now = 27
        refit()
        with served_between_runs(site, identity):
            assert eventually(lambda: kept(site)[-1].release == 4), caplog.text
            expected = labels(DEVICES, 27) - labels(DEVICES, 18) + labels(DEVICES, 12)
            assert counted(site, kept(site)[-1]).tolist() == expected.tolist()
            for name in DEVICES:
                extras = {PRIOR: prior_of(site, kept(site)[-1])}
                own = StatisticsOffers(site.folder / name)
                others = own.without_own(extras, kept(site)[-1].extractor.sha256)[PRIOR]["count"]
                mine = labels([name], 27) - labels([name], 18) + labels([name], 12)
                assert others.tolist() == (expected - mine).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sums": "masked"},
            "without an identity of the server: expected plain, or certificates for masked sums",
        ),
        (
            {"sums": "plain", "identity": "ids"},
            "expected masked: devices with certificates send nothing else",
        ),
    ],
)
def test_sums_that_no_device_takes_part_in_are_rejected_before_the_run(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with ExitStack(), pytest.raises(ConfigError, match=message):
        run(Site(None, tmp_path), **changes)


def test_a_method_with_a_head_of_its_own_is_rejected_before_the_run(tmp_path: Path) -> None:
    site = Site(None, tmp_path)
    with pytest.raises(ConfigError, match="Fed-RoD shares a head or no extractor"):
        site.run("fed-rod", edit=lambda recipe: replace(recipe, statistics=StatisticsConfig("plain")))


FULL = ("full-0", "full-1", "full-2")


def test_full_devices_of_the_run_add_their_training_pictures_under_the_released_extractor(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_certificates(tmp_path, monkeypatch, [*FULL, *DEVICES])
    site.data = partial(labelled, 12)
    given = dict[str, np.ndarray]()
    offer = FullWorker.offer

    def noted(self: FullWorker, id: str, request: SumRequest) -> Any:
        vector = offer(self, id, request)
        if vector is not None:
            given[self.device] = vector
        return vector

    monkeypatch.setattr(FullWorker, "offer", noted)

    def edit(recipe: Recipe) -> Recipe:
        identity = BrokerConfig(identity=str(folder / "full-0"))
        everybody = CohortConfig(min_devices=len(FULL), wait_s=60.0, deadline_s=90.0)
        release = ReleaseConfig(every=1, wait_s=60.0, heads=len(DEVICES))
        return replace(recipe, broker=identity, cohort=everybody, release=release)

    def verifying(name: str, store: Store, *arguments: Any, **options: Any) -> FullWorker:
        trust = Trust(store.folder / "tuf", trust_on_first_use=True)
        return FullWorker(name, store, *arguments, verifies=trust, **options)

    with site.fleet(FULL, DEVICES, other=dict.fromkeys(FULL, verifying)):  # type: ignore[arg-type]
        results = site.run("fedrep", 2, edit=edit)
        record = results.sum()
        assert record and record.masked and record.devices == tuple(sorted([*FULL, *DEVICES]))
        assert counted(site, kept(site)[-1]).tolist() == labels([*FULL, *DEVICES], 12).tolist()
        store = Store(site.folder / "pi-0")
        served = serving(store, Slots(store.folder / "release"))
        assert served and PRIOR in served.installed.manifest.extras
        for name in FULL:  # as a head-only device with the released ONNX file would
            data = site.data(name)
            loaded = LocalFeatureLoader(lambda classes, input, d=data: d, tmp_path / name)([served.installed])  # type: ignore[misc]
            features = loaded.by_extractor[0]
            assert features
            expected = class_statistics.of(features.train.z, features.train.y, 3).flat
            assert given[name] == pytest.approx(expected, abs=1e-4)
        before = counted(site, kept(site)[-1]).tolist()
    assert not any((site.folder / name / "statistics" / "trained.msgpack").exists() for name in FULL)
    assert before == labels([*FULL, *DEVICES], 12).tolist()


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedbn"])
def test_full_devices_take_part_only_with_the_extractor_that_is_released(method: str) -> None:
    built = toy.method(method)
    start = steps.start(built)
    assert is_as_broadcast(built, start, start, ["a", "b"], toy.INPUT.shape) is (method != "fedbn")
    other = {**start, "extractor": {name: 2 * t for name, t in start["extractor"].items()}}
    assert not is_as_broadcast(built, start, other, ["a"], toy.INPUT.shape)
    assert is_as_broadcast(built, start, other, [], toy.INPUT.shape) is (method != "fedbn")


def test_an_extractor_without_weights_is_as_broadcast() -> None:
    rows = InputSpec((4,), (0.0,), (1.0,), "F", "float32")
    built = toy.method("fedrep", build_net(ModelConfig("identity"), rows, 3))
    assert is_as_broadcast(built, steps.start(built), steps.start(built), ["a"], rows.shape)
