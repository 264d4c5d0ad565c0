"""The monitor delivers events for new images, board problems, drift and used-up budgets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from edge_fl.data.class_names import OUTSIDE
from edge_fl.fleet.settings import Budget
from edge_fl.wire.messages import Capability
from edge_fl_devices.agent import events
from edge_fl_devices.agent.state import AgentState
from edge_fl_devices.agent.step import step
from edge_fl_devices.board.health import CALM_S, Readings
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.data.spec import DataSpec
from edge_fl_devices.features import drift
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.monitor import DeviceMonitor
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.worker import Worker
from tests.devices.agent.agents import TOPICS
from tests.devices.images import X, picture

UNLIMITED, WELL = Budget(), Readings()


@dataclass
class Board:
    """A device with its monitor, a settable clock and board."""

    home: Path
    tier: str = "full"
    budget: Budget = UNLIMITED
    now_s: float = 1000.0
    readings: Readings = WELL
    bytes: int = 0
    cpu_s: float = 0.0
    heard: list[events.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        can = Capability(self.tier, "test", "3", notes=["full: torch", "measured"])  # type: ignore[arg-type]
        worker = HeadWorker.__new__(HeadWorker)
        Worker.__init__(worker, "pi-01", Store(self.home))
        self.device = Device(AgentState("pi-01", "boot", TOPICS, can), worker)
        config = DeviceConfig(
            "pi-01", str(self.home / "images"), folder=str(self.home), budget=self.budget, refit_every_s=100
        )
        meter = Meter(self.home, lambda: self.bytes, lambda: "2026-01-01", lambda: self.cpu_s)
        self.monitor = DeviceMonitor(
            config,
            self.device,
            self.take,
            meter,
            lambda: self.now_s,
            lambda: self.readings,
            lambda: self.device.state.capability,
        )

    def take(self, event: events.Event) -> None:
        self.heard.append(event)
        self.device.state, _ = step(self.device.state, event, self.now_s)

    def look(self, after_s: float = 10.0) -> list[events.Event]:
        """Events of one more check."""
        self.now_s += after_s
        before = len(self.heard)
        self.monitor.check()
        return self.heard[before:]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    picture(tmp_path / "images" / "a" / "0.png")
    return Board(tmp_path)


def test_new_images_count_once_stable_and_at_most_every_refit_interval(board: Board) -> None:
    assert board.look() == []
    picture(board.home / "images" / "a" / "1.png")
    assert board.look() == []  # may still be being written
    (changed,) = board.look()
    assert isinstance(changed, events.DataChanged) and board.device.state.refit
    picture(board.home / "images" / "a" / "2.png")
    assert board.look() == [] and board.look() == []  # within refit_every_s
    assert [type(event) for event in board.look(after_s=100)] == [events.DataChanged]


def test_the_class_list_of_a_release_is_counted_without_another_fit(
    board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    board.monitor.check_count()
    assert board.heard == []  # nothing was counted yet
    skipped, hints = {f"{OUTSIDE}, nearest 'horse'": 8}, ("folder 'hourse' is not a class",)
    report = DataReport(("cat", "horse"), (5, 0), skipped, hints)
    record.remember(board.home, report, DataSpec(("cat", "horse")))
    board.monitor.check_count()
    (changed,) = board.heard
    assert isinstance(changed, events.DataChanged) and not board.device.state.refit
    assert (changed.capability.samples, changed.capability.samples_per_class) == (5, [5, 0])
    assert (
        "8 files skipped: in a folder that is not in the class list, nearest 'horse'"
        in changed.capability.notes
    )
    assert not any("hourse" in note for note in changed.capability.notes)  # the folder's name stays here
    assert "hourse" in caplog.text
    board.monitor.check_count()
    assert len(board.heard) == 1


def test_a_full_device_is_demoted_at_once_and_promoted_after_a_calm_period(board: Board) -> None:
    board.readings = Readings(throttled=0x1)
    (demoted,) = board.look()
    assert isinstance(demoted, events.TierChanged) and demoted.capability.tier == "head"
    assert board.device.state.reason == "under-voltage"
    board.readings = Readings()
    assert board.look() == []
    (promoted,) = board.look(after_s=CALM_S)
    assert isinstance(promoted, events.TierChanged) and promoted.capability.tier == "full"
    assert board.device.state.reason == ""


def test_a_head_only_device_is_not_demoted(tmp_path: Path) -> None:
    board = Board(tmp_path, tier="head", readings=Readings(throttled=0x1))
    assert board.look() == []


def test_a_used_up_budget_is_delivered_once(tmp_path: Path) -> None:
    board = Board(tmp_path, tier="head", budget=Budget(cpu_s=10))
    board.cpu_s = 11.0
    assert [type(event) for event in board.look()] == [events.BudgetChanged]
    assert board.look() == [] and "processor" in board.device.state.reason


RNG = np.random.default_rng(5)
Z = RNG.normal(size=(200, 8)).astype(np.float32) * 3 + 1


def test_what_is_predicted_shows_drift_and_a_new_fit_ends_it(folder: Path) -> None:
    predictor, sha = Predictor(folder, remember=True), Store(folder).heads()[0].head.extractor
    z = predictor.extractor.features(X)
    drift.remember_fit(folder, drift.moments(sha, z))
    for _ in range(4):
        predictor.predict(X)
    assert drift.measured(folder) == 0.0
    for _ in range(20):
        predictor.predict(np.full_like(X, 255))
    board = Board(folder, tier="head")
    (drifted,) = board.look()
    assert isinstance(drifted, events.Drifted) and drifted.score > drift.THRESHOLD
    assert board.device.state.reason == "drift" and board.device.state.capability.drift == drifted.score
    drift.remember_fit(folder, drift.moments(sha, z + 1))
    assert board.look() == [events.Drifted(0.0)] and board.device.state.reason == ""


def test_images_that_need_too_much_memory_are_reported_and_counted_again_later(board: Board) -> None:
    counted = board.monitor.inspect

    def fail() -> Capability | None:
        raise MemoryError("data: out of memory")

    board.monitor.inspect = fail
    picture(board.home / "images" / "a" / "1.png")
    board.look()
    found = [event for event in board.look() if isinstance(event, events.DataChanged)]
    assert [event.why for event in found] == [
        "out_of_memory"
    ] and board.device.state.reason == "out_of_memory"
    board.monitor.inspect = counted
    assert board.look(after_s=10) == []
    found = [event for event in board.look(after_s=100) if isinstance(event, events.DataChanged)]
    assert [event.why for event in found] == [""] and not board.device.state.reason


def test_a_device_that_started_without_memory_for_its_images_counts_them_again(board: Board) -> None:
    assert not any(isinstance(event, events.DataChanged) for event in board.look())
    board.device.state = replace(board.device.state, data_problem="out_of_memory")
    board.monitor = replace(board.monitor)
    found = [event for event in board.look() if isinstance(event, events.DataChanged)]
    assert len(found) == 1 and not board.device.state.reason
