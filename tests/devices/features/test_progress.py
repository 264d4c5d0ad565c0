"""A slow reading of the pictures says how far it is and when it will be done; a fast one says nothing."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_fl.console.progress import Progress
from edge_fl_devices.agent.state import Phase
from edge_fl_devices.doctor import status
from edge_fl_devices.features import child_loader
from edge_fl_devices.features.child_loader import ReadingProgress
from edge_fl_devices.runtime.run_device import StatusDisplay

NOON_S = time.mktime((2026, 6, 1, 12, 0, 0, 0, 0, -1))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return NOON_S + self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reading(tmp_path: Path, clock: Clock) -> ReadingProgress:
    (tmp_path / "features").mkdir()
    return ReadingProgress(tmp_path, clock, clock.wall)


def test_a_fast_reading_is_not_shown(reading: ReadingProgress, tmp_path: Path, clock: Clock) -> None:
    reading.begin("features")
    for done in range(0, 2001, 500):
        clock.now_s += 1
        reading(done, 2000)
    assert reading.current is None and child_loader.read_progress(tmp_path, clock.wall()) is None


def test_a_slow_reading_says_when_it_will_be_done(
    reading: ReadingProgress, tmp_path: Path, clock: Clock
) -> None:
    reading.begin("features")
    reading(100, 2000)  # known already: they do not count for the pace for long
    for done in range(100, 401, 10):
        clock.now_s += 2
        reading(done, 2000)
    assert str(reading.current) == "features of 400 of 2,000 files, done at about 12:06"
    assert child_loader.read_progress(tmp_path, clock.wall()) == reading.current
    assert (
        child_loader.read_progress(tmp_path, clock.wall() + child_loader.STALE_S) is None
    )  # its process is gone
    reading.end()
    assert reading.current is None and not (tmp_path / child_loader.PROGRESS_FILE).exists()


def test_the_status_shows_it(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "features").mkdir()
    reading = ReadingProgress(tmp_path, clock)
    reading.begin("features")
    for done in (1, 2):
        clock.now_s += 60
        reading(done, 8)
    (row,) = (row for row in status.read(tmp_path) if row["what"] == "under way")
    assert str(row["value"]).startswith("features of 2 of 8 files, done at about ")


def test_the_agent_prints_a_line_a_minute(
    reading: ReadingProgress, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = SimpleNamespace(
        name="pi-1", fetching=None, state=SimpleNamespace(published=None, phase=Phase.UP, work=None)
    )
    display = StatusDisplay(agent, Progress(live=False), reading)  # type: ignore[arg-type]
    reading.begin("features")
    for done in range(1, 131):
        clock.now_s += 1
        reading(done, 1000)
        display.update()
    lines = capsys.readouterr().err.splitlines()
    assert [line[:34] for line in lines] == [
        "pi-1: features of 5 of 1,000 files",
        "pi-1: features of 65 of 1,000 file",
        "pi-1: features of 125 of 1,000 fil",
    ]


def test_a_reading_is_stale_only_after_its_deadline() -> None:
    assert child_loader.DEADLINE_S < child_loader.STALE_S
