"""A board is measured once per set-up, within its time, and what was measured decides what it may do."""

import socket
from itertools import count
from pathlib import Path

import numpy as np

from edge_fl.fields import Tier
from edge_fl.wire.endpoint import Endpoint
from edge_fl_devices.board import benchmark
from edge_fl_devices.board.benchmark import FILE, LIMIT_S, Speed, measure, reach_ms, speed, steps
from edge_fl_devices.board.capabilities import FULL_MIN_GFLOPS, choose_tier
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.features import child_main
from edge_fl_devices.features.child_loader import FeatureRequest
from edge_fl_devices.storage.slots import Slots
from tests.devices.images import X, Y, picture


def test_a_board_is_measured_once_per_set_up(tmp_path: Path) -> None:
    first = speed(tmp_path, "a", None, child_main._extract_zeros)
    assert first.gflops > 0 and first.head_ms > 0 and first.sample_ms == 0
    assert speed(tmp_path, "a", None, child_main._extract_zeros) == first
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace('"gflops":', '"gflops":1e9,"x":'))
    assert speed(tmp_path, "a", None, child_main._extract_zeros).gflops == 1e9  # what is kept counts
    assert speed(tmp_path, "b", None, child_main._extract_zeros).gflops < 1e9


def test_an_installed_extractor_is_measured_too(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", x=X, y=Y)
    config = DeviceConfig("pi-1", str(tmp_path / "images.npz"), folder=str(folder))
    found = child_main.inspect(FeatureRequest(config))
    assert found.speed.sample_ms > 0 and "ms a sample" in str(found.speed)
    assert Slots(folder / "release").current()


def test_a_folder_that_is_no_class_of_the_release_is_told_as_skipped(folder: Path, tmp_path: Path) -> None:
    current = Slots(folder / "release").current()
    assert current
    for name in (*current.manifest.classes, "zebra"):
        for value in range(4):
            picture(tmp_path / "images" / name / f"{value}.png", value)
    config = DeviceConfig("pi-1", f"folder:{tmp_path / 'images'}", folder=str(folder), tier="head")
    found = child_main.inspect(FeatureRequest(config))
    assert found.report and found.report.samples == 8
    assert sum(found.report.skipped.values()) == 4
    assert found.report.notes == ["4 files skipped: in a folder that is not in the class list"]


def test_what_would_begin_too_late_is_left_out() -> None:
    ticks = count(step=LIMIT_S)
    found = measure(steps(None, child_main._extract_zeros, training=True), lambda: float(next(ticks)))
    assert found == Speed(found.gflops) and found.gflops > 0


def test_a_slow_board_is_head_only_however_much_memory_it_has() -> None:
    assert choose_tier(8000, torch=True, gflops=FULL_MIN_GFLOPS / 2)[0] is Tier.HEAD
    assert "GFLOP/s" in choose_tier(8000, torch=True, gflops=1.0)[1]
    assert choose_tier(8000, torch=True, gflops=FULL_MIN_GFLOPS)[0] is Tier.FULL


def test_torch_is_started_only_where_training_may_be_asked_for() -> None:
    assert "torch_s" in steps(None, child_main._extract_zeros, training=True)
    assert "torch_s" not in steps(None, child_main._extract_zeros, training=False)


def test_a_torch_that_does_not_start_makes_no_full_device() -> None:
    assert benchmark._torch_s("pass") > 0
    assert benchmark._torch_s("raise SystemExit(1)") == 0
    chosen, why = choose_tier(8000, torch=True, starts=False)
    assert chosen is Tier.HEAD and "did not start" in why


def test_the_way_to_the_broker_is_measured_and_its_absence_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as broker:
        there = Endpoint("127.0.0.1", broker.getsockname()[1])
        assert 0 < reach_ms(there) < 1000
    assert reach_ms(there) == 0
