"""A device notices new images, a board that is not well, drift and a budget that is used up; and it says so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from devices import agent
from devices.board import health, usage
from devices.board.health import CALM_S, Health, Readings, follow, judge
from devices.board.usage import Budget, Meter, Usage, exceeded
from devices.config import DeviceConfig
from devices.data import Need, load, load_for
from devices.device import Device
from devices.machine import effects, events
from devices.machine.state import AgentState, wake_at
from devices.predict import Predictor
from devices.sight import drift
from devices.store import Store
from devices.tiers import EitherWorker
from devices.watch import Watch
from devices.work import Worker
from edge_fl.errors import DataError
from edge_fl.wire.messages import Capability, DeviceState, Want
from tests.devices.test_agent import TOPICS
from tests.devices.test_agent import Device as Agent
from tests.devices.test_predict import X, folder

__all__ = ["folder"]


UNLIMITED, WELL = Budget(), Readings()


def picture(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(abs(hash(path.name)) % 1000).integers(0, 256, (4, 4), np.uint8)
    Image.fromarray(pixels + np.uint8(value)).save(path)


@dataclass
class Board:
    """A device with its watch, a clock and a board that the test sets."""

    home: Path
    tier: str = "full"
    budget: Budget = UNLIMITED
    now_s: float = 1000.0
    readings: Readings = WELL
    bytes: int = 0
    cpu_s: float = 0.0
    heard: list[events.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        can = Capability(self.tier, "test", "3", notes=["full: torch"])  # type: ignore[arg-type]
        worker = EitherWorker.__new__(EitherWorker)
        Worker.__init__(worker, "pi-01", Store(self.home))
        self.device = Device(AgentState("pi-01", "boot", TOPICS, can), worker)
        config = DeviceConfig(
            "pi-01", str(self.home / "images"), folder=str(self.home), budget=self.budget, refit_every_s=100
        )
        meter = Meter(self.home, lambda: self.bytes, lambda: "2026-01-01", lambda: self.cpu_s)
        self.watch = Watch(
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
        self.device.state, _ = agent.step(self.device.state, event, self.now_s)

    def look(self, after_s: float = 10.0) -> list[events.Event]:
        """What one more look leads to."""
        self.now_s += after_s
        before = len(self.heard)
        self.watch.look()
        return self.heard[before:]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    picture(tmp_path / "images" / "a" / "0.png")
    return Board(tmp_path)


def test_new_images_are_noticed_once_they_have_settled_and_at_most_so_often(board: Board) -> None:
    assert board.look() == []
    picture(board.home / "images" / "a" / "1.png")
    assert board.look() == []  # it may still be written
    (changed,) = board.look()
    assert isinstance(changed, events.DataChanged) and board.device.state.refit
    picture(board.home / "images" / "a" / "2.png")
    assert board.look() == [] and board.look() == []  # within refit_every_s
    assert [type(event) for event in board.look(after_s=100)] == [events.DataChanged]


@pytest.mark.parametrize(
    ("readings", "why"),
    [
        (Readings(throttled=0x1), "under-voltage"),
        (Readings(throttled=0x50005), "under-voltage, throttled"),
        (Readings(throttled=0x50000), ""),  # it happened, but is over
        (Readings(battery_percent=12, discharging=True), "battery at 12 %"),
        (Readings(battery_percent=12, discharging=False), ""),
        (Readings(available_mb=20), "20 MB of memory left"),
        (Readings(), ""),
    ],
)
def test_what_is_wrong_with_a_board_is_said_in_words(readings: Readings, why: str) -> None:
    assert judge(readings) == why


def test_a_full_device_is_demoted_at_once_and_promoted_after_a_calm_while(board: Board) -> None:
    board.readings = Readings(throttled=0x1)
    (demoted,) = board.look()
    assert isinstance(demoted, events.TierChanged) and demoted.capability.tier == "head"
    assert board.device.state.reason == "under-voltage"
    board.readings = Readings()
    assert board.look() == []
    (promoted,) = board.look(after_s=CALM_S)
    assert isinstance(promoted, events.TierChanged) and promoted.capability.tier == "full"
    assert board.device.state.reason == ""


def test_a_board_on_the_edge_does_not_flap() -> None:
    state = follow(Health(), "too hot", 0)
    for now_s in range(0, 3000, 300):
        state = follow(state, "too hot" if now_s % 600 == 0 else "", now_s)
        assert state.why == "too hot"


def test_a_head_only_device_is_not_demoted(tmp_path: Path) -> None:
    board = Board(tmp_path, tier="head", readings=Readings(throttled=0x1))
    assert board.look() == []


def test_readings_come_from_sys_and_proc(tmp_path: Path) -> None:
    battery = tmp_path / "sys/class/power_supply/BAT0"
    battery.mkdir(parents=True)
    for name, text in (("type", "Battery\n"), ("capacity", "15\n"), ("status", "Discharging\n")):
        (battery / name).write_text(text)
    firmware = tmp_path / "sys/devices/platform/soc/soc:firmware"
    firmware.mkdir(parents=True)
    (firmware / "get_throttled").write_text("50005\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\nMemAvailable:   51200 kB\n")
    assert health.read(tmp_path) == Readings(0x50005, 15, True, 50)


def test_work_that_a_demoted_device_cannot_do_is_dropped_and_the_status_says_why() -> None:
    device = Agent("full").up()
    device.hear(Want(1, "train", "t", 1, "w-1"))
    can = Capability("head", "x86_64", "3.12", notes=["head: too hot"])
    done = device.on(events.TierChanged(can, "too hot"))
    said = [effect.message for effect in done if isinstance(effect, effects.Publish)]
    assert can in said and device.state.tier == "head"
    device.on(events.Tick(), 0.4)
    status = [
        e.message
        for e in device.last
        if isinstance(e, effects.Publish) and isinstance(e.message, DeviceState)
    ]
    assert status[-1].why == "too hot" and device.state.outbox[0].parcel.report.error == "unsupported_tier"


def test_beyond_a_budget_nothing_new_is_begun_until_there_is_one_again() -> None:
    device = Agent().up()
    device.on(events.Rationed("budget: bytes"))
    device.hear(Want(1, "serve", "t", 1, "rel-1", release=3))
    assert not any(isinstance(effect, effects.Refresh) for effect in device.done)
    assert device.state.reason == "budget: bytes"
    assert any(isinstance(effect, effects.Refresh) for effect in device.on(events.Rationed("")))


def test_beyond_a_budget_nobody_is_woken_for_work_that_may_not_begin() -> None:
    device = Agent().up()
    device.hear(Want(1, "serve", "t", 1, "rel-1", release=3))
    device.on(events.Failed("missing"))
    assert wake_at(device.state) < math.inf
    device.on(events.Rationed("budget: bytes"))
    assert wake_at(device.state) == math.inf


def test_what_was_used_today_survives_a_restart_and_not_the_day(tmp_path: Path) -> None:
    sent, cpu_s, day = [100], [2.0], ["2026-01-01"]
    meter = Meter(tmp_path, lambda: sent[0], lambda: day[0], lambda: cpu_s[0])
    sent[0], cpu_s[0] = 300, 5.0
    assert meter.update() == Usage("2026-01-01", 200, 5.0) == usage.read(tmp_path)
    again = Meter(tmp_path, lambda: 50, lambda: day[0], lambda: 1.0)
    assert again.update() == Usage("2026-01-01", 200, 6.0)
    day[0] = "2026-01-02"
    assert again.update() == Usage("2026-01-02", 0, 0.0)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget(), ""),
        (Budget(megabytes=3), "bytes 3.0 of 3 MB"),
        (Budget(cpu_s=90), "processor 100.0 of 90 s"),
        (Budget(kilojoules=0.2, watts=2.5), "energy (estimate) 0.2 of 0.2 kJ"),
    ],
)
def test_the_budget_that_is_used_up_is_named(budget: Budget, words: str) -> None:
    found = exceeded(Usage("d", 3_000_000, 100.0), budget)
    assert words in found and bool(found) == bool(words)


def test_a_used_up_budget_is_told_once_and_its_end_too(tmp_path: Path) -> None:
    board = Board(tmp_path, tier="head", budget=Budget(cpu_s=10))
    board.cpu_s = 11.0
    assert [type(event) for event in board.look()] == [events.Rationed]
    assert board.look() == [] and "processor" in board.device.state.reason


RNG = np.random.default_rng(5)
Z = RNG.normal(size=(200, 8)).astype(np.float32) * 3 + 1


def test_images_of_the_same_kind_are_no_drift_and_others_are() -> None:
    fitted = drift.moments("e", Z)
    same = drift.moments("e", RNG.normal(size=(60, 8)).astype(np.float32) * 3 + 1)
    assert drift.score(fitted, same) < drift.THRESHOLD / 2
    assert drift.score(fitted, drift.moments("e", Z[:60] + 3)) == pytest.approx(1.0, abs=0.3)
    assert drift.score(fitted, drift.moments("e", Z[:10] + 30)) == 0.0  # too few to tell
    assert drift.score(fitted, drift.moments("other", Z + 30)) == 0.0


def test_moments_of_two_parts_are_those_of_the_whole() -> None:
    parts = drift.joined(drift.moments("e", Z[:80]), drift.moments("e", Z[80:]))
    whole = drift.moments("e", Z)
    np.testing.assert_allclose(parts.mean, whole.mean, atol=1e-5)
    np.testing.assert_allclose(parts.variance, whole.variance, rtol=1e-5)


def test_what_is_predicted_shows_drift_and_a_new_fit_ends_it(folder: Path) -> None:
    predictor, sha = Predictor(folder, remember=True), Store(folder).heads()[0].head.extractor
    z = predictor._extractor.features(X)
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
    drift.remember_fit(folder, drift.moments(sha, z))
    assert board.look() == [events.Drifted(0.0)] and board.device.state.reason == ""


def config_for(path: Path, **settings: object) -> DeviceConfig:
    return DeviceConfig("pi-01", str(path), **settings)  # type: ignore[arg-type]


def test_a_device_keeps_to_its_classes(tmp_path: Path) -> None:
    for name in "abc":
        for number in range(4):
            picture(tmp_path / name / f"{name}{number}.png")
    report = load_for(config_for(tmp_path, classes=["a", "c"]), Need())[1]
    assert report.samples_per_class == (4, 0, 4) and report.skipped == {
        "of a class that this device leaves out": 4
    }
    with pytest.raises(DataError, match="no usable image"):
        load_for(config_for(tmp_path, classes=["z"]), Need())


def test_a_bounded_device_works_with_the_newest_images_or_with_a_fair_sample(tmp_path: Path) -> None:
    y = np.arange(100) % 2
    x = np.random.default_rng(0).integers(0, 256, (100, 1, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    np.savez(tmp_path / "more.npz", x=np.concatenate([x, x[:1] ^ 255]), y=np.append(y, 0))

    def kept(name: str, policy: str) -> set[bytes]:
        data, _ = load_for(config_for(tmp_path / name, keep=20, policy=policy), Need())
        return {image.tobytes() for part in (data.train, data.validation, data.test) for image in part.x}

    assert kept("all.npz", "newest") == {image.tobytes() for image in x[-20:]}
    fair = kept("all.npz", "reservoir")
    assert len(fair) == 20 and fair != kept("all.npz", "newest")
    assert len(fair - kept("more.npz", "reservoir")) <= 1  # one more image moves at most one out


def test_of_a_folder_only_the_kept_pictures_are_read(tmp_path: Path) -> None:
    for number in range(12):
        picture(tmp_path / "ab"[number % 2] / f"{number}.png")
    for policy in ("newest", "reservoir"):
        _, report = load_for(config_for(tmp_path, keep=6, policy=policy), Need())
        assert report.samples == 6
    assert load(str(tmp_path))[1].samples == 12
