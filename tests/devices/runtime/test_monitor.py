"""The monitor delivers events for new images, board problems, drift and used-up budgets."""

import threading
import time
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_config

from edge_fl.data.class_names import OUTSIDE
from edge_fl.errors import KilledError
from edge_fl.fleet.remote_settings import Budget
from edge_fl.wire.messages import Capability
from edge_fl_devices.agent import events
from edge_fl_devices.agent.effects import Job
from edge_fl_devices.agent.state import LIMITS
from edge_fl_devices.agent.step import step
from edge_fl_devices.board.health import CALM_S, Readings
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.first_guesses import FirstGuess, FirstGuesses
from edge_fl_devices.data.location import Snapshot
from edge_fl_devices.data.record import DataReport
from edge_fl_devices.doctor import status
from edge_fl_devices.features import drift
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.monitor import DeviceMonitor
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.worker import Material, Worker
from tests.devices.agent.agents import TOPICS
from tests.devices.images import X, picture

UNLIMITED, WELL = Budget(), Readings()


class Idle(Worker):
    """A worker without work."""

    def perform(self, job: Job, material: Material) -> events.Event:
        raise AssertionError(job)


@dataclass
class Board:
    """A device with its monitor, a settable clock and board."""

    home: Path
    tier: str = "full"
    budget: Budget = UNLIMITED
    now_s: float = field(default_factory=time.monotonic)  # reports of an earlier start end by this clock
    readings: Readings = WELL
    bytes: int = 0
    cpu_s: float = 0.0
    heard: list[events.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        can = Capability(self.tier, "test", "3", max_opset=9, notes=["full: torch", "measured"])  # type: ignore[arg-type]
        self.device = Device("pi-01", TOPICS, can, Idle("pi-01", Store(self.home)))
        config = DeviceConfig(
            "pi-01", str(self.home / "images"), folder=str(self.home), budget=self.budget, refit_every_s=100
        )
        meter = Meter(self.home, lambda: self.bytes, lambda: "2026-01-01", lambda: self.cpu_s)
        self.current = CurrentData(config)
        self.monitor = DeviceMonitor(
            config,
            self.device,
            self.take,
            meter,
            lambda snapshot: self.device.state.capability,
            self.current,
            lambda: self.now_s,
            lambda: self.readings,
        )
        self.monitor._check_images()  # the first count
        self.heard.clear()

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


def test_new_images_count_once_stable(board: Board) -> None:
    assert board.look() == []
    picture(board.home / "images" / "a" / "1.png")
    assert board.look() == []  # may still be being written
    (changed,) = board.look()
    assert isinstance(changed, events.DataChanged) and board.device.state.refit
    picture(board.home / "images" / "a" / "2.png")
    assert board.look() == [] and [type(event) for event in board.look()] == [events.DataChanged]


def test_fits_are_at_most_every_refit_interval_while_images_keep_coming_and_soon_after_a_quiet_time(
    board: Board,
) -> None:
    began_s, counts = board.now_s, []
    for number in range(40):  # a new image every 30 s
        picture(board.home / "images" / "a" / f"{number}-new.png")
        for _ in range(3):
            if data_changes(board):
                counts.append(board.now_s - began_s)
    pauses = [round(later - earlier) for earlier, later in pairwise(counts)]
    least = [10, 20, 40, 80, *[100] * 40]  # doubles from watch_s to refit_every_s
    assert pauses[0] <= 30 and all(
        low <= found <= low + 30 for low, found in zip(least, pauses, strict=False)
    )
    board.look(), board.look(after_s=100), board.look(after_s=100)
    picture(board.home / "images" / "a" / "quiet.png")
    assert board.look() == [] and len(data_changes(board)) == 1


def test_the_images_of_a_fit_count_before_the_agent_hears_of_them(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a" / "0.png")
    board = Board(tmp_path, tier="head")
    accepted = []

    def take(event: events.Event) -> None:
        accepted.append(len(board.current.now().files or ()))

    board.look()
    board.monitor.deliver = take
    picture(tmp_path / "images" / "a" / "1.png")
    board.look(), board.look()
    assert accepted == [2]


def test_the_class_list_of_a_release_is_counted_without_another_fit(
    board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    board.monitor.check_count()
    assert board.heard == []  # nothing was counted yet
    skipped, hints = {f"{OUTSIDE}, nearest 'horse'": 8}, ("folder 'hourse' is not a class",)
    report = DataReport(("cat", "horse"), (5, 0), skipped, hints)
    record.remember(board.home, report, ("cat", "horse"))
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


def test_labels_outside_their_sets_break_the_promise_and_later_ones_inside_mend_it(folder: Path) -> None:
    guesses, board = FirstGuesses(folder), Board(folder, tier="head")
    assert board.look() == []

    def label(count: int, inside: bool, **kind: object) -> None:
        for _ in range(count):
            possible = ("a", "b") if inside else ("b",)
            key = len(guesses.rows).to_bytes(4)
            guesses.add(FirstGuess(key, "a", "b", possible=possible, promise=0.9, **kind))  # type: ignore[arg-type]

    label(40, inside=True)
    label(30, inside=False, chosen=True)  # informative ones are harder, and say nothing
    assert board.look() == []
    label(15, inside=False)
    (found,) = board.look()
    assert isinstance(found, events.PromiseChecked) and found.missed == 15 / 50
    assert board.device.state.reason == "promise_broken"
    rows = {row["what"]: row["value"] for row in status.read(folder)}
    assert (
        rows["promise"] == "in 35 of 50 cases the prediction set had the right class: the promise is broken"
    )
    label(80, inside=True)
    assert board.look() == [events.PromiseChecked(0.0)] and board.device.state.reason == ""


def out_of_memory(snapshot: Snapshot) -> Capability:
    raise MemoryError("data: out of memory")


def killed(snapshot: Snapshot) -> Capability:
    raise KilledError("data: the child was ended by SIGSEGV", "SIGSEGV")


def data_changes(board: Board, after_s: float = 10.0) -> list[events.DataChanged]:
    return [event for event in board.look(after_s) if isinstance(event, events.DataChanged)]


def test_images_that_need_too_much_memory_are_reported_and_counted_again_later(board: Board) -> None:
    counted, board.monitor.inspect = board.monitor.inspect, out_of_memory
    picture(board.home / "images" / "a" / "1.png")
    board.look()
    assert [event.why for event in data_changes(board)] == ["out_of_memory"]
    assert board.device.state.reason == "out_of_memory"
    board.monitor.inspect = counted
    assert board.look(after_s=10) == []
    assert [event.why for event in data_changes(board, after_s=100)] == [""]
    assert not board.device.state.reason and board.device.state.refit


def test_a_count_that_fails_once_is_repeated_and_the_new_images_count(board: Board) -> None:
    board.look()
    counted, board.monitor.inspect = board.monitor.inspect, killed
    before = board.current.now()
    picture(board.home / "images" / "a" / "1.png")
    board.look()
    assert [event.why for event in data_changes(board)] == ["killed"] and not board.device.state.refit
    assert board.current.now() == before  # not accepted
    assert data_changes(board, after_s=10) == []  # the same failure is no news
    board.monitor.inspect = counted
    assert [(event.why, event.refit) for event in data_changes(board, after_s=100)] == [("", True)]
    assert board.current.now() == board.current.look() != before


def test_the_first_count_fits_again_only_if_the_images_changed_since_the_last_fit(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a" / "0.png")
    for fitted, refit in (("", False), ("other", True), (CurrentData(data_of(tmp_path)).stamp(), False)):
        Store(tmp_path).keep_fitted_data(fitted)
        assert Board(tmp_path).device.state.refit is refit


def test_the_first_count_fits_on_an_installed_release_that_was_never_fitted(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a" / "0.png")
    board = Board(tmp_path, tier="head")
    for installed, samples, refit in ((0, 5, False), (3, 0, False), (3, 5, True)):
        capability = replace_config(board.device.state.capability, samples=samples)
        board.device.state = replace(board.device.state, installed=installed, capability=capability)
        board.monitor._counted = None
        board.monitor._check_images()
        assert board.device.state.refit is refit


def data_of(home: Path) -> DeviceConfig:
    return DeviceConfig("pi-01", str(home / "images"), folder=str(home))


@pytest.mark.parametrize("watch_s", [0.0, 0.01])
def test_the_images_are_counted_at_once_and_failures_do_not_end_the_thread(
    board: Board, watch_s: float
) -> None:
    config = replace_config(board.monitor.config, watch_s=watch_s)
    clock = count(board.now_s, 30)
    board.monitor = replace(board.monitor, config=config, clock=lambda: next(clock), _counted=None)
    stopped, asked = threading.Event(), []

    def inspect(snapshot: Snapshot) -> Capability:
        asked.append(snapshot)
        if len(asked) < 3:
            raise KilledError("data: the child was ended by SIGSEGV", "SIGSEGV")
        stopped.set()
        return board.device.state.capability

    board.monitor.inspect = inspect
    board.monitor.run(stopped)
    assert len(asked) == 3 and [event.why for event in board.heard][:2] == ["killed", ""]  # type: ignore[attr-defined]


def test_a_count_whose_child_is_always_killed_is_given_up_until_something_changes(
    board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Snapshot] = []
    counted = board.monitor.inspect

    def inspect(snapshot: Snapshot) -> Capability:
        asked.append(snapshot)
        raise KilledError("data: the child was ended by SIGILL", "SIGILL")

    board.monitor.inspect = inspect
    board.look()
    picture(board.home / "images" / "a" / "1.png")
    for _ in range(30):
        board.look(after_s=1000)
    assert len(asked) == LIMITS.max_kills and board.device.state.reason == "killed"
    assert "SIGILL; not tried again until new data, another release or a restart" in caplog.messages[-1]
    board.device.state = replace(board.device.state, release=7)  # another release
    board.look()
    assert len(asked) == LIMITS.max_kills + 1
    board.monitor.inspect = counted
    picture(board.home / "images" / "a" / "2.png")
    board.look(), board.look(after_s=1000)
    assert not board.device.state.reason and board.device.state.refit


def test_an_unexpected_error_of_one_check_is_a_state_and_hinders_neither_the_others_nor_the_thread(
    board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    found, errors = board.monitor.current.found, iter([ZeroDivisionError("no divisor")] * 3)

    def fails() -> Snapshot:
        for error in errors:
            raise error
        return found()

    board.monitor.current.found = fails  # type: ignore[method-assign]
    board.readings = Readings(throttled=0x1)
    assert [type(event) for event in board.look()] == [events.Impaired, events.TierChanged]
    assert (board.device.state.impaired, board.device.state.demoted) == ("error", "under-voltage")
    assert board.look() == []
    (record,) = [record for record in caplog.records if record.exc_info]  # once, although it failed twice
    assert "pi-01: monitoring: ZeroDivisionError: no divisor; trying again" in record.getMessage()
    board.look()
    assert [event.why for event in board.look() if isinstance(event, events.Impaired)] == [""]


def test_the_thread_of_the_monitor_survives_any_exception(board: Board) -> None:
    stopped, fails = threading.Event(), count()

    def found() -> Snapshot:
        if next(fails) == 3:
            stopped.set()
        raise RuntimeError("anything")

    board.monitor.current.found = found  # type: ignore[method-assign]
    clock = count(board.now_s, 30)
    config = replace_config(board.monitor.config, watch_s=0.001)
    board.monitor = replace(board.monitor, config=config, clock=lambda: next(clock))
    board.monitor.run(stopped)
    assert next(fails) == 4 and board.device.state.impaired == "error"


def test_a_file_counts_once_it_is_stable_and_no_longer_once_it_is_gone_or_written_anew(board: Board) -> None:
    images = board.home / "images" / "a"
    board.look()
    (old,) = board.current.now().files or ()
    picture(images / "1.png")
    assert board.current.now().files == {old}
    board.look(), board.look(after_s=100)
    assert len(board.current.now().files or ()) == 2
    (images / "1.png").unlink()
    assert board.current.now().files == {old}
    picture(images / "0.png", 3)
    assert board.current.now().files == frozenset()
