"""The runner notifies systemd that it is ready, alive and stopping; a hanging runner sends nothing."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_fl_devices.runtime import runner as runners
from edge_fl_devices.runtime.runner import Notifier, Runner


@pytest.fixture
def systemd() -> Iterator[tuple[dict[str, str], Callable[[], list[str]]]]:
    """(environment, received): a socket as systemd makes it, with a watchdog timeout of 0.375 s."""
    name = f"edge-fl-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.setblocking(False)

        def received() -> list[str]:
            found = []
            while True:
                try:
                    found.append(listener.recv(100).decode())
                except BlockingIOError:
                    return found

        yield {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "375000"}, received


class Idle:
    """A clock, and an inbox in which nothing ever is: waiting for it is all that takes time."""

    now_s = 1.0

    def monotonic(self) -> float:
        return self.now_s

    def get(self, timeout: float) -> None:
        self.now_s += timeout
        raise queue.Empty


def test_a_runner_sends_ready_then_alive_then_stopping(
    systemd: tuple[dict[str, str], Callable[[], list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, received = systemd
    runner, idle = Runner(notifier=Notifier(environment)), Idle()
    monkeypatch.setattr(runners, "time", idle)
    monkeypatch.setattr(runner, "_inbox", idle)
    runner.run(deadline_s=0.5, every_s=1 / 32)
    assert received() == ["READY=1", *["WATCHDOG=1"] * 4, "STOPPING=1"]  # every 0.125 s


def test_a_runner_that_hangs_is_silent(systemd: tuple[dict[str, str], Callable[[], list[str]]]) -> None:
    environment, received = systemd
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> bool:
        hangs.set()
        return goes_on.wait(60)

    thread = threading.Thread(target=Runner(notifier=Notifier(environment)).run, kwargs={"done": hang})
    thread.start()
    assert hangs.wait(60)
    received()
    time.sleep(0.5)
    assert received() == []
    goes_on.set()
    thread.join(60)


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "x"}])
def test_a_missing_socket_is_no_error(environment: dict[str, str], tmp_path: Path) -> None:
    notifier = Notifier(environment)
    notifier.ready()
    notifier.alive(0.0)
    notifier.stopping()
