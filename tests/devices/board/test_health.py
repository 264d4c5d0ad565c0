"""Board problems are read from the system, described, and kept for a while."""

from pathlib import Path

import pytest

from edge_fl_devices.board import health
from edge_fl_devices.board.health import Health, Readings, problem, update


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
def test_board_problems_are_described(readings: Readings, why: str) -> None:
    assert problem(readings) == why


def test_a_board_at_its_limit_does_not_switch_back_and_forth() -> None:
    state = update(Health(), "too hot", 0)
    for now_s in range(0, 3000, 300):
        state = update(state, "too hot" if now_s % 600 == 0 else "", now_s)
        assert state.why == "too hot"


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
