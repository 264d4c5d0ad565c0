"""Progress of a job: bars on a terminal, occasional lines elsewhere, nothing under --quiet."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_fl.console import units
from edge_fl.console.output import QUIET
from edge_fl.console.progress import Count, Progress
from tests.clock import Clock

TERMINAL = """
from edge_fl.console.progress import Count, Progress
with Progress() as progress:
    for done in range(6):
        progress(Count("rounds", done, 5))
        progress(Count("release 3", done << 20, 8 << 20, bytes=True))
        progress.print(f"round [{done}]")
"""


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def progress(clock: Clock) -> Iterator[Progress]:
    with Progress(live=False, clock=clock) as progress:
        yield progress


def told(progress: Progress, clock: Clock, *counts: tuple[float, Count]) -> None:
    for after_s, count in counts:
        clock.now_s += after_s
        progress(count)


def test_a_long_stage_prints_lines_with_rate_and_time_left(
    progress: Progress, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    told(progress, clock, (0, Count("clients", 0, 100)), (5, Count("clients", 20, 100)))
    assert capsys.readouterr().err == ""
    told(progress, clock, (5, Count("clients", 40, 100)), (9, Count("clients", 76, 100)))
    assert capsys.readouterr().err == "clients: 40 of 100, 4.0/s, about 15 s left\n"


def test_a_stage_that_begins_anew_forgets_its_pace(
    progress: Progress, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    told(progress, clock, (0, Count("clients", 0, 10)), (9, Count("clients", 9, 10)))
    told(progress, clock, (1, Count("clients", 0, 10)), (9, Count("clients", 1, 10)))
    assert capsys.readouterr().err == ""
    told(progress, clock, (3, Count("clients", 1, 10)))
    assert capsys.readouterr().err == "clients: 1 of 10, 5.0/min, about 2 min left\n"


def test_the_time_left_follows_the_recent_pace_and_not_a_slow_start(
    progress: Progress, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    told(progress, clock, (0, Count("rounds", 0, 100)), (60, Count("rounds", 1, 100)))
    for done in range(2, 61):
        told(progress, clock, (1, Count("rounds", done, 100)))
    assert capsys.readouterr().err.splitlines()[-1] == "rounds: 51 of 100, 1.0/s, about 49 s left"


def test_a_missed_estimate_is_replaced_by_the_time_that_has_passed(
    progress: Progress, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    told(
        progress,
        clock,
        *((1, Count("rounds", done, 20)) for done in range(11)),
        (90, Count("rounds", 11, 20)),
        (90, Count("rounds", 12, 20)),
    )
    assert capsys.readouterr().err.splitlines() == [
        "rounds: 10 of 20, 1.0/s, about 10 s left",
        "rounds: 11 of 20, for 2 min",
        "rounds: 12 of 20, for 3 min",
    ]


def test_no_time_left_is_shown_before_the_first_unit(
    progress: Progress, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    told(progress, clock, (0, Count("heads", 0, 8)), (20, Count("heads", 0, 8)))
    assert capsys.readouterr().err == "heads: 0 of 8\n"


def test_bytes_are_said_as_bytes(
    progress: Progress, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    told(progress, clock, (0, Count("release 3", 0, 4 << 20, bytes=True)))
    told(progress, clock, (10, Count("release 3", 1 << 20, 4 << 20, bytes=True)))
    assert capsys.readouterr().err == "release 3: 1.0 MiB of 4.0 MiB, 102 KiB/s, about 30 s left\n"


def test_quiet_is_quiet(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(QUIET, "1")
    with Progress(live=True, clock=clock) as progress:
        told(progress, clock, (0, Count("clients", 0, 9)), (60, Count("clients", 3, 9)))
        progress.print("round 1")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_bars_and_keeps_the_lines_above_them() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"} | {QUIET: ""}
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL], stderr=theirs, stdout=subprocess.PIPE, env=environment, check=True
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", closefd=True) as terminal:
        seen = _read(terminal.fileno())
    assert done.stdout == b""
    assert "release 3" in seen and "5.0 MiB of 8.0 MiB" in seen and "rounds" in seen
    assert all(f"round [{number}]" in seen for number in range(6))


def _read(terminal: int) -> str:
    """All that was written; a terminal whose other end is closed gives an error instead of an end."""
    seen = b""
    while True:
        try:
            if not (more := os.read(terminal, 65536)):
                break
        except OSError:
            break
        seen += more
    return seen.decode()


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.44, "0.4 s"), (99, "99.0 s"), (100, "2 min"), (9000, "2.5 h")]
)
def test_durations_are_as_long_as_they_need_to_be(seconds: float, said: str) -> None:
    assert units.seconds(seconds) == said


def test_a_simulation_tells_of_rounds_and_of_clients_within_them(tmp_path: Path) -> None:
    from edge_fl_server.orchestrate.execution import simulate
    from edge_fl_server.recipes.recipe import Recipe, with_settings
    from edge_fl_server.training import studies

    recipe = with_settings(
        Recipe(name="tiny", rounds=2),
        ["data.clients=3", 'model.name="cnn-tiny"', 'data.dataset="digits"', 'engine="sequential"'],
    )
    counts: list[Count] = []
    simulate(studies.prepare(recipe), watch=counts.append)
    assert [count.done for count in counts if count.stage == "rounds"] == [0, 1, 2]
    assert [count.done for count in counts if count.stage == "clients"] == [0, 1, 2, 3, 3] * 2
    assert [count.done for count in counts if count.stage == "final personalisation"] == [0, 1, 2, 3, 3]
