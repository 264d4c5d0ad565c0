"""An agent is ready before it looks at its pictures, however many they are, and whatever happens to the child that counts them."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from edge_fl_devices.data import record
from edge_fl_devices.data.record import DataRecord, DataReport
from tests.devices.images import picture
from tests.devices.opened import Opened
from tests.power import Disk, fill

WAIT_S = 60.0


@contextmanager
def agent(home: Path, images: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Run an agent without a broker, with a notify socket as systemd's."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
        (home.parent / "log").open("wb") as log,
    ):
        notify.bind(str(home.parent / "notify"))
        notify.settimeout(WAIT_S)
        command = [sys.executable, "-m", "edge_fl", "device", "run", "--id", "pi-1", "--dir", str(home)]
        process = subprocess.Popen(
            [*command, "--data", str(images), "--host", "127.0.0.1", "--port", "1", *options],
            env={**os.environ, "NOTIFY_SOCKET": str(home.parent / "notify")},
            stderr=log,
        )
        try:
            yield process, notify
        finally:
            process.terminate()
            process.wait(WAIT_S)


def eventually(holds: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.05)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(40):
        picture(tmp_path / "images" / "ab"[number % 2] / f"{number}.png")
    return tmp_path / "images"


def test_no_picture_is_opened_or_listed_before_the_agent_is_ready(tmp_path: Path, images: Path) -> None:
    home = tmp_path / "pi"
    with (
        closing(Opened(images, images / "a", images / "b")) as opened,
        agent(home, images, "--tier", "head") as (process, notify),
    ):
        assert select.select([notify, opened.descriptor], [], [], WAIT_S)[0]
        # whoever sends first and lists then has sent by the time that the list is seen
        assert select.select([notify], [], [], 0)[0], f"before it was ready: {opened.read()}"
        assert notify.recv(100) == b"READY=1"
        eventually(lambda: record.read(home).report.samples, "the count")
        assert {f"{number}.png" for number in range(40)} <= set(opened.read())
        assert record.read(home) == DataRecord(DataReport(("a", "b"), (20, 20), {}))
        eventually(lambda: b"40 samples" in (tmp_path / "log").read_bytes(), "the line about the count")
        assert b"counting samples" in (tmp_path / "log").read_bytes()
        assert process.poll() is None


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_child_that_is_killed_before_the_agent_is_ready_does_not_end_it(
    tmp_path: Path, images: Path
) -> None:
    home = tmp_path / "pi"
    with agent(home, images, "--tier", "head") as (process, notify):
        eventually(lambda: children_of(process.pid), "a child")
        for child in children_of(process.pid):
            os.kill(child, signal.SIGSEGV)
        assert notify.recv(100) == b"READY=1"
        assert process.poll() is None
        eventually(lambda: record.read(home).report.samples, "the count by another child")
        log = (tmp_path / "log").read_text()
        assert "SIGSEGV" in log, log
        assert "Traceback" not in log


@pytest.mark.parametrize("source", ["images", "nowhere", "images.npz", "python:no_module:data"])
def test_an_agent_runs_without_usable_data_and_says_why(tmp_path: Path, source: str) -> None:
    (tmp_path / "images").mkdir()
    home, data = tmp_path / "pi", source if ":" in source else str(tmp_path / source)
    with agent(home, Path(data), "--tier", "head") as (process, notify):
        assert notify.recv(100) == b"READY=1"
        eventually(lambda: record.read(home).problem, "the reason")
        assert (
            record.read(home).why == ("no_labels" if source == "images" else "no_data")
            and process.poll() is None
        )
    assert process.returncode == 0


def test_a_setting_that_can_never_work_ends_the_agent(tmp_path: Path, images: Path) -> None:
    with agent(tmp_path / "pi", images, "--head", "none-such") as (process, _):
        assert process.wait(WAIT_S) == 4


def test_an_agent_that_starts_on_a_full_disk_waits_for_room_instead_of_ending(
    tmp_path: Path, images: Path
) -> None:
    home, log = tmp_path / "pi", tmp_path / "log"
    home.mkdir()
    with Disk(tmp_path / "disk.img", home, 16):
        fill(str(home / "filler"))
        with agent(home, images, "--tier", "head") as (process, notify):
            assert notify.recv(100) == b"READY=1"
            eventually(lambda: b"start: enospc, 65536 bytes needed" in log.read_bytes(), "the reason")
            assert process.poll() is None and not (home / "memory.json").exists()
            (home / "filler").unlink()
            eventually(lambda: record.read(home).report.samples, "the count")
            assert process.poll() is None
