"""The surroundings of the boards of the soak: a calendar that the test moves, the broker, the server and the operator's commands."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edge_fl import TELEMETRY_OFF
from edge_fl_server.registry import Database, registered_devices
from tests.agents import eventually

DAY_S = 86_400
LIBRARY = "faketime/libfaketimeMT.so.1"
SLEEP = """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""
"""A module for the start of every Python: libfaketime 0.9.10 refuses the call that `time.sleep` makes, clock_nanosleep until a time."""

FLEET = "main"


@dataclass
class Calendar:
    """The date that processes see: the real one plus `days`, read from `file` again every second."""

    file: Path
    days: float = 0.0

    def set(self, days: float) -> None:
        """Move the date of all processes that use this calendar."""
        self.days = days
        part = self.file.with_suffix(".part")
        part.write_text(f"{days * DAY_S:+.0f}\n")
        part.replace(self.file)

    def environment(self, library: str | None = None, file: str | None = None) -> dict[str, str]:
        """Variables of a process that sees this date; library and file: their paths in its own root."""
        return {
            "LD_PRELOAD": library or str(_library()),
            "FAKETIME_TIMESTAMP_FILE": file or str(self.file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # else a thread that waits for another one's lock uses a whole core
            "NO_FAKE_STAT": "1",
        }


def _library() -> Path:
    found = next(Path("/usr/lib").glob(f"*/{LIBRARY}"), None)
    return found or pytest.skip("faketime is not installed (Debian package faketime)")


def variables() -> dict[str, str]:
    """The variables of a user: without what this process has set at its import of edge_fl."""
    others = ("PYTHONPATH", "NOTIFY_SOCKET", *TELEMETRY_OFF)
    known = {name: value for name, value in os.environ.items() if name not in others}
    return {**known, "OMP_NUM_THREADS": "1"}


class Service:
    """One process that the test starts, stops and kills; its output is appended to `log`."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path
    ) -> None:
        self._command, self.log, self._environment, self._folder = command, log, environment, folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it must not be running."""
        assert self.process is None or self.process.poll() is not None
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End it in order, as systemd does: all its processes get the signal."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(120)

    def kill(self) -> None:
        """End it with all its children at once, as a power cut does."""
        if self.process:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def require_alive(self) -> None:
        """Fail if it has ended by itself."""
        assert self.process is not None and self.process.poll() is None, f"ended: {self.tail()}"

    def tail(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-3000:]


@dataclass
class World:
    """Broker, server and commands, each a process of its own in `folder`, all with the date of `calendar`."""

    folder: Path
    boards: tuple[str, ...]
    life_days: int  # of the boards' certificates
    calendar: Calendar = field(init=False)
    broker: Service = field(init=False)
    server: Service = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self._hook = self.folder / "hook"
        self._hook.mkdir()
        (self._hook / "sitecustomize.py").write_text(SLEEP)
        self.calendar = Calendar(self.folder / "calendar")
        self.calendar.set(0)
        self.port = _free_port()
        self._broker_dir, self._server_home = "runs/broker", "runs/releases"
        self.edge_fl("fleet", "enrol", "--baked", "--days", str(self.life_days), *self.boards)
        self.broker = self._service("broker", "up", "--dir", self._broker_dir, "--port", str(self.port))
        self.server = self._server()

    def _server(self) -> Service:
        connection = ("--port", str(self.port), "--identity", "runs/identities/server")
        return self._service("server", "up", *connection, *self.homes)

    def _service(self, name: str, *words: str) -> Service:
        command = (sys.executable, "-m", "edge_fl", name, *words)
        return Service(command, self.folder / f"{name}.log", self._environment(), self.folder)

    @property
    def homes(self) -> tuple[str, ...]:
        """Options of the server's folder and registry."""
        return ("--home", self._server_home, "--database", self._registry)

    @property
    def _registry(self) -> str:
        return f"{Path(self._server_home).parent}/server/registry.sqlite"

    @property
    def operator(self) -> tuple[str, ...]:
        """Options of an operator's command."""
        return ("--port", str(self.port), "--identity", "runs/identities/operator", *self.homes)

    def identity(self, board: str) -> Path:
        """The folder with a board's certificate, as enrolled."""
        return self.folder / "runs/identities/devices" / board

    def edge_fl(self, *words: str, expected: int = 0, deadline_s: float = 900) -> str:
        """Run a command of an operator -> its output."""
        done = subprocess.run(
            [sys.executable, "-m", "edge_fl", *words],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        assert done.returncode == expected, f"{' '.join(words)}: {done.returncode}\n{done.stdout[-3000:]}"
        return done.stdout

    def start(self) -> None:
        """Start broker and server."""
        self.broker.start()
        eventually(lambda: _accepts(self.port), "the broker accepts connections")
        self.server.start()
        eventually(lambda: (self.folder / self._registry).exists(), "the server's registry")

    def stop(self) -> None:
        """End server and broker."""
        self.server.stop()
        self.broker.stop()

    def move_broker(self) -> None:
        """Replace the broker by one that retains nothing, at the same address: the card of its computer is gone."""
        self.broker.kill()
        shutil.move(self.folder / self._broker_dir, self.folder / f"{self._broker_dir}-gone")
        self.broker.start()
        eventually(lambda: _accepts(self.port), "the new broker accepts connections")

    def move_server(self) -> None:
        """Move the server's folder, as to another computer, and start it there."""
        self.server.stop()
        before, self._server_home = self.folder / "runs", f"moved-{self.calendar.days:.0f}/releases"
        target = self.folder / Path(self._server_home).parent
        target.mkdir()
        for name in ("releases", "server"):
            shutil.move(before / name, target / name)
        self.server = self._server()
        self.server.start()

    def served(self, board: str) -> int:
        """The release that the server knows this board to serve; 0 if it knows none."""
        db = Database.open(str(self.folder / self._registry))
        try:
            found = registered_devices.get(db, FLEET, board)
        finally:
            db.close()
        return found.release if found else 0

    def _environment(self) -> dict[str, str]:
        return {**variables(), **self.calendar.environment(), "PYTHONPATH": str(self._hook)}


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
