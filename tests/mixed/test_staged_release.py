"""Releases reach a fleet of real agents in stages; a bad one is aborted early and rolled back automatically."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.data.samples import ClientData, Samples
from edge_fl.wire.messages import Capability, Report
from edge_fl.wire.topics import Topics
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install.fetch import FetchLimits
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_server.mqtt import connector
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database, registered_devices, registered_tags, rollouts
from edge_fl_server.registry.tables import DeviceRecord, RolloutRecord
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.coordinator import CoordinatorOptions, RolloutCoordinator
from edge_fl_server.release.rollout.stages import rank
from edge_fl_server.release.rollout.stored_rollout import request
from edge_fl_server.selectors import SelectorError
from tests.devices import graphs
from tools.memory_broker import InMemoryBroker, InMemoryTransport

QUICK = AgentLimits(settle_s=0.05, resend_s=2.0, retry_s=0.1, return_s=0.1)
FAST = FetchLimits(quiet_s=0.05)
PLAN = RolloutConfig(stages=(0.1, 0.5, 1.0), stage_wait_s=60)
GOOD = np.zeros((16, graphs.DIM), np.float32)
GOOD[:8, 0] = GOOD[8:, 1] = 1.0  # one feature sees the upper half of an image, another one the lower half
BAD = GOOD * np.float32([1, 0, 1])  # the lower half is lost


def images(count: int, hidden: float) -> Samples:
    """Two classes that differ in the upper half, a share `hidden` of the images only in the lower half; none is like another."""
    y = np.arange(count) % 2
    x = np.random.default_rng(count).integers(80, 120, (count, 1, 4, 4), np.uint8)
    below = np.arange(count) // 2 % round(1 / hidden) == 0 if hidden else np.zeros(count, bool)
    for half, seen in ((slice(0, 2), ~below), (slice(2, 4), below)):
        x[seen, :, half] += (100 * y[seen, None, None, None]).astype(np.uint8)
    return Samples(x, y)


@dataclass
class Fleet:
    """A server with a registry and its agents."""

    rollout: RolloutCoordinator
    db: Database
    repository: Repository
    devices: dict[str, Device] = field(default_factory=dict)

    def release(self, weights: np.ndarray) -> int:
        number = self.repository.next_release()
        payload = graphs.graph(weights=weights)
        manifest = graphs.manifest_for(payload, release=number)
        self.rollout.roll_out(manifest, {manifest.extractor.sha256: payload})
        return number

    def serving(self) -> list[int]:
        return sorted({device.state.release for device in self.devices.values()})

    def record(self) -> RolloutRecord:
        return rollouts.listed(self.db, "main")[0]

    @staticmethod
    def eventually(claim: Callable[[], object], deadline_s: float = 90.0) -> None:
        until = time.monotonic() + deadline_s
        while not claim():
            assert time.monotonic() < until, "did not happen"
            time.sleep(0.02)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """`fleet(devices, hidden)`: agents with `tested` test images; a share `hidden` of them differs only in the lower half.

    Only on every fifth device by rank in release 2, or on all with `everywhere`.
    """
    broker, runner, closing = InMemoryBroker(), Runner(workers=2), []
    connect = partial(InMemoryTransport, broker)

    def make(count: int, hidden: float = 0.0, tested: int = 200, everywhere: bool = False) -> Fleet:
        repository, db = Repository(tmp_path / "home"), Database.open(tmp_path / "registry.sqlite")
        connection = ServerConnection(connect, Journal(db), limits=connector.LeaseLimits(settle_s=0.05))
        server = Server.of(connection)
        connection.open()
        rollout = RolloutCoordinator(server, repository, CoordinatorOptions(plan=PLAN))
        closing.extend([rollout.close, connection.close, db.close])
        made = Fleet(rollout, db, repository)
        for position, name in enumerate(
            sorted(map("pi-{:03d}".format, range(count)), key=lambda id: rank(id, 2))
        ):
            share = hidden if everywhere or position % 5 == 2 else 0.0
            data = ClientData(images(40, share), images(0, 0), images(tested, share))
            worker = HeadWorker(
                name,
                Store(tmp_path / name),
                FitSettings("nearest"),
                loader=LocalFeatureLoader(lambda classes, input, data=data: data, tmp_path / name),
                fitter=fit_here,
                runtime=runtime,
                check=lambda installed: None,
                limits=QUICK,
                trust=Trust(tmp_path / name / "tuf", repository.root_bytes),
            )
            can = Capability("head", "test", "3", samples=40)
            made.devices[name] = Device(name, Topics("main"), can, worker, limits=QUICK, fetching=FAST)
            runner.add(made.devices[name], connect)
        thread = threading.Thread(target=partial(runner.run, deadline_s=1000), daemon=True)
        thread.start()
        closing.extend([runner.stop, lambda: thread.join(90)])
        return made

    yield make
    for close in (*closing[3:], *closing[:3]):
        close()
    broker.close()


def test_ten_points_lost_on_a_fifth_of_the_devices_abort_a_release_within_two_stages(
    fleet: Callable[..., Fleet],
) -> None:
    site = fleet(40, hidden=0.2)
    site.release(GOOD)
    site.rollout.wait(0, 60)
    assert (site.record().state, site.serving()) == ("completed", [1])

    site.release(BAD)
    site.eventually(lambda: site.record().state == "aborted")
    record = site.record()
    assert (record.release, record.previous, record.stage) == (2, 1, 1)
    assert "accuracy changed by" in record.reason and "bottom decile" in record.reason
    site.rollout.wait(0, 60)
    site.eventually(lambda: site.serving() == [1])
    outcomes = site.rollout.stages.outcomes
    first = sum(rank(name, 2) < PLAN.stages[0] for name in site.devices)
    assert first < len(outcomes) <= 20  # how far into the second stage depends on the order of reports
    assert {outcome.lost for outcome in outcomes.values()} == {0, 20}
    untouched = [name for name in site.devices if rank(name, 2) >= 0.5]
    assert len(untouched) >= 15
    assert all(site.devices[name].reporting.last["head"].release == 1 for name in untouched)
    assert all(site.devices[name].reporting.last["head"].id == "back-1-2" for name in outcomes)
    assert all(
        found.reporting.last["head"].metrics[metrics.PERSONAL_AFTER] == 1.0 for found in site.devices.values()
    )
    assert [manifest.release for manifest in site.repository.releases()] == [2, 1]  # signed anew, the newest


@pytest.mark.parametrize(("devices", "tested"), [(16, 10), (16, 40)])
def test_a_loss_of_half_the_accuracy_does_not_pass_the_first_stage_of_a_small_fleet(
    fleet: Callable[..., Fleet], devices: int, tested: int
) -> None:
    site = fleet(devices, hidden=1.0, tested=tested, everywhere=True)
    site.release(GOOD)
    site.rollout.wait(0, 60)
    site.release(BAD)
    site.eventually(lambda: site.record().state in ("aborted", "paused"))
    record, stages = site.record(), site.rollout.stages
    assert (record.release, record.stage) == (2, 0), record
    assert len(stages.outcomes) <= 4
    lost = sum(outcome.lost - outcome.gained for outcome in stages.outcomes.values())
    assert lost >= 0.3 * tested * len(stages.outcomes)
    if record.state == "paused":
        assert "became wrong" in record.reason
        rollouts.steer(
            site.db, record.number, "running"
        )  # resumed by hand, it pauses again for the same reason
        site.eventually(lambda: site.record().desired == site.record().state == "paused")
        assert site.record().stage == 0
        rollouts.steer(site.db, record.number, "aborted")
    site.eventually(lambda: site.serving() == [1])


def test_a_harmless_release_reaches_the_whole_fleet(fleet: Callable[..., Fleet]) -> None:
    site = fleet(12)
    site.release(GOOD)
    site.rollout.wait(0, 60)
    site.release(BAD)  # no device has images that differ in the lower half
    site.rollout.wait(0, 60)
    site.eventually(lambda: (site.record().state, site.serving()) == ("completed", [2]))


def test_another_process_pauses_resumes_and_rolls_back(fleet: Callable[..., Fleet]) -> None:
    site = fleet(10)
    site.release(GOOD)
    site.rollout.wait(0, 60)
    number = rollouts.begin(site.db, "main", 1, previous=1, plan={"stages": [0.5, 1.0]})
    rollouts.steer(site.db, number, "paused")
    site.eventually(lambda: site.record().state == "paused")
    rollouts.steer(site.db, number, "running")
    site.eventually(lambda: site.record().state == "completed")
    site.release(GOOD * 2)
    rollouts.steer(site.db, site.record().number, "rolled_back")
    site.eventually(lambda: site.record().state == "rolled_back")
    assert site.record().reason == "by hand"
    site.eventually(lambda: site.serving() == [1])


def test_a_report_from_outside_the_stage_is_rejected(fleet: Callable[..., Fleet]) -> None:
    site = fleet(12)
    site.release(GOOD)
    site.rollout.wait(0, 60)
    number = rollouts.begin(site.db, "main", 1, previous=1, plan={"stages": [0.3, 1.0]})
    rollouts.steer(site.db, number, "paused")
    site.eventually(lambda: site.record().state == "paused")
    outsider = next(name for name in site.devices if rank(name, 1) >= 0.3)
    report = Report(
        id=f"rel-1-again-{number}", kind="head", boot="b", samples=1, release=1, error="canary_failed"
    )
    verdict = site.rollout._take_report(outsider, report)
    assert verdict and (verdict.status, verdict.reason) == ("rejected", "not_assigned")
    assert outsider not in site.rollout.stages.outcomes


def test_devices_that_a_roll_out_does_not_select_keep_their_release(fleet: Callable[..., Fleet]) -> None:
    site = fleet(6)
    for weights in (GOOD, GOOD * 2):
        site.release(weights)
        site.rollout.wait(0, 60)
        site.eventually(lambda: site.record().state == "completed")

    def serving() -> dict[str, int]:
        return {name: device.state.release for name, device in sorted(site.devices.items())}

    berlin = ["pi-000", "pi-001", "pi-002"]
    registered_devices.record(
        site.db, [DeviceRecord("main", name, capability={"tier": "head"}) for name in site.devices]
    )
    registered_tags.change(site.db, "main", berlin, {"site": "berlin"})
    request(site.db, "main", 1, RolloutConfig(stages=(1.0,), where="site=berlin"))
    site.eventually(lambda: site.record().state == "completed")
    partly = {name: 1 if name in berlin else 2 for name in site.devices}
    site.eventually(lambda: serving() == partly)
    assert rollouts.served_release(site.db, "main") == 2  # the release of the whole fleet

    # before their stage has begun, devices keep what they had; after a roll-back they have it again
    number = rollouts.begin(site.db, "main", 2, previous=2, plan={"stages": [0.001, 1.0]})
    rollouts.steer(site.db, number, "paused")
    site.eventually(lambda: site.record().state == "paused")
    site.rollout._assign_all()
    assert [site.rollout._target(name)[0].release for name in sorted(partly)] == [1, 1, 1, 2, 2, 2]
    rollouts.steer(site.db, number, "running")
    site.eventually(lambda: (site.record().state, site.serving()) == ("completed", [2]))


def test_a_roll_out_to_a_selector_that_cannot_be_parsed_is_not_requested(fleet: Callable[..., Fleet]) -> None:
    site = fleet(0)
    with pytest.raises(SelectorError, match=r"@berlin', expected a saved group"):
        request(site.db, "main", 1, RolloutConfig(where="@berlin"))
    assert rollouts.listed(site.db, "main") == []
