"""The launcher starts the environment that the state names, and returns from one that fails, without any server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_fl.release.agent import UpdateStatus
from edge_fl_devices.agent_update import launcher
from edge_fl_devices.agent_update.state import Updates

CONFIRM = f"""exec {sys.executable} -c '
from edge_fl_devices.agent_update.state import Updates
Updates.of_environment().confirm()'"""
CRASH = "exit 1"
HANG = "exec sleep 100"
GROW = f"exec {sys.executable} -c 'x = bytearray(200 << 20); import time; time.sleep(100)'"


class Board:
    """An installation whose environments are scripts; each start adds a line to `starts`."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "starts"
        self.updates = Updates(folder / "updates", folder / "factory")
        self.environment(folder / "factory", "exit 0")

    def environment(self, folder: Path, script: str) -> None:
        python = folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho "{folder.name} $*" >>{self.log}\n{script}\n')
        python.chmod(0o755)

    def update(self, number: int, script: str, *, trial_s: float = 60.0, memory_mb: int = 4096) -> None:
        self.environment(self.updates.folder(number), script)
        status = UpdateStatus(number, f"agent-{number}", "trial")
        self.updates.switch(status, serves=True, trial_s=trial_s, memory_mb=memory_mb)

    def launcher(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, launcher.__file__, str(self.updates.home), str(self.updates.factory)]
        return subprocess.Popen([*command, "device", "run"], start_new_session=True)

    def start(self) -> list[str]:
        """Start once as systemd does -> the environments that started."""
        self.log.unlink(missing_ok=True)
        assert self.launcher().wait(110) == 0
        return self.started()

    def started(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_without_an_update_the_factory_environment_starts_with_the_arguments(board: Board) -> None:
    assert board.start() == ["factory"]
    assert board.log.read_text() == "factory -I -m edge_fl device run\n"


def test_a_confirmed_update_starts_from_then_on(board: Board) -> None:
    board.update(1, CONFIRM)
    assert board.start() == ["1"]
    state = board.updates.state()
    assert (state.current, state.pending, state.last.state, state.number) == ("1", False, "done", 1)
    assert board.start() == ["1"]


def test_an_update_that_crashes_at_its_start_is_left_after_three_starts(board: Board) -> None:
    board.update(2, CRASH)
    assert board.start() == ["2", "2", "2", "factory"]
    state = board.updates.state()
    assert (state.current, state.last.state, state.last.why) == ("", "failed", "crash_loop")


@pytest.mark.parametrize(
    "script, limits, why",
    [(HANG, {"trial_s": 3.0}, "not_connected"), (GROW, {"memory_mb": 100}, "out_of_memory")],
)
def test_an_update_that_does_not_confirm_itself_or_grows_is_ended(
    board: Board, script: str, limits: dict[str, float], why: str
) -> None:
    board.update(2, script, **limits)  # type: ignore[arg-type]
    assert board.start() == ["2", "factory"]
    assert board.updates.state().last.why == why


def test_a_failed_update_returns_to_the_update_before_it(board: Board) -> None:
    board.update(1, CONFIRM)
    board.start()
    board.update(2, CRASH)
    assert board.start() == ["2", "2", "2", "1"]
    assert board.updates.state().current == "1"


def test_starts_before_a_power_cut_count(board: Board) -> None:
    board.update(2, HANG)
    for _ in range(launcher.MAX_STARTS):
        running, before = board.launcher(), len(board.started())
        until = time.monotonic() + 60
        while len(board.started()) == before:
            assert time.monotonic() < until
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert board.start() == ["factory"]
    assert board.updates.state().last.why == "crash_loop"


def test_an_orderly_stop_ends_the_agent_on_trial(board: Board) -> None:
    board.update(2, HANG)
    running, until = board.launcher(), time.monotonic() + 60
    while not board.started():
        assert time.monotonic() < until
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    assert running.wait(110) == 0
    assert board.updates.state().pending and board.started() == ["2"]


def test_a_confirmed_environment_that_no_longer_runs_gives_way(board: Board) -> None:
    board.update(1, CONFIRM)
    board.start()
    python = board.updates.home / "1" / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho 1 >>{board.log}\n")  # ends before the agent runs
    assert [board.start() for _ in range(4)] == [["1"], ["1"], ["1"], ["factory"]]


def test_an_agent_that_runs_resets_the_count(board: Board) -> None:
    board.update(1, CONFIRM)
    board.start()
    for _ in range(2 * launcher.MAX_STARTS):
        assert board.start() == ["1"]
        board.updates.mark_running()


def test_a_start_on_trial_that_cannot_be_counted_starts_the_environment_before(board: Board) -> None:
    board.update(1, CONFIRM)
    board.start()
    python = board.updates.home / "1" / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho 1 >>{board.log}\n")
    board.update(2, CRASH)
    (board.updates.home / ".state.json.part").mkdir()  # nothing can be written, as on a full disk
    assert board.start() == ["1"]
    assert board.updates.state().pending  # it is tried once the start can be counted
    (board.updates.home / ".state.json.part").rmdir()
    assert board.start() == ["2", "2", "2", "1"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"current": "1"}', bytes(range(256))])
def test_a_damaged_state_starts_the_factory_environment(board: Board, content: bytes) -> None:
    board.update(1, CONFIRM)
    (board.updates.home / launcher.STATE).write_bytes(content)
    assert board.start() == ["factory"]


def test_a_missing_environment_gives_way(board: Board) -> None:
    board.update(1, CONFIRM)
    (board.updates.home / "1" / "bin" / "python").unlink()
    assert board.start() == ["factory"]
    assert board.updates.state().last.why == "incomplete"


def test_a_new_installation_starts_its_own_environment(board: Board, tmp_path: Path) -> None:
    board.update(1, CONFIRM)
    state = json.loads((board.updates.home / launcher.STATE).read_bytes())
    (board.updates.home / launcher.STATE).write_text(json.dumps({**state, "factory": "/elsewhere"}))
    assert board.start() == ["factory"]


def test_tidy_deletes_what_no_state_names(board: Board) -> None:
    board.update(1, CONFIRM)
    board.environment(board.updates.home / "left", "exit 0")
    (board.updates.home / ".state.json.part").touch()
    board.updates.tidy()
    assert sorted(path.name for path in board.updates.home.iterdir()) == ["1", "state.json"]
