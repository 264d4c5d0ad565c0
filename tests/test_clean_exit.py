"""A terminated or interrupted command leaves no process, temporary folder, shared memory or semaphore; a killed one no process or memory.

All processes of a command are found by a variable in their environment, which they inherit even into sessions of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.training.engines import processes

SHARED_MEMORY = Path("/dev/shm")
VARIABLE = "EDGE_FL_TEST_COMMAND"
START_S, END_S = 90.0, 20.0
SIMULATION = ["simulate", "--set", "rounds=100000", "--set", "evaluate_every=1", "--clients", "6"]
UNGUARDED = """
from pathlib import Path
from edge_fl import config
from edge_fl.config import Recipe
from edge_fl_server.orchestrate import run
from edge_fl_server.orchestrate.setup import RunRequest

recipe = config.with_settings(Recipe(name="x"), ["engine=pool", "rounds=1", "source=simulated", "data.clients=4"])
print(run.run(RunRequest(recipe, runs=Path("runs")))[0].path)
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


class Command:
    """A running `edge-fl` command with its own folder for temporary files."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.log = folder / "log"
        self.temporary = Path(
            tempfile.mkdtemp(prefix="efl-")
        )  # short: a socket's path has at most 107 characters
        variables = {VARIABLE: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "edge_fl", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=os.environ | variables | {"PYTHONPATH": str(Path(__file__).parents[1])},
                start_new_session=True,
                preexec_fn=_unignore_interrupts,
            )

    def pids(self) -> list[int]:
        """All its processes that run."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._owns(path)]

    def shared(self) -> set[Path]:
        """The files in shared memory that its processes map or have open, and the folders of these files."""
        files = set()
        for pid in self.pids():
            with suppress(OSError):
                files |= {
                    Path(line.split()[5])
                    for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
                    if "/dev/shm/" in line
                }
            for link in Path(f"/proc/{pid}/fd").glob("*"):
                with suppress(OSError):
                    files.add(link.readlink())
        return {
            SHARED_MEMORY / path.parts[3]
            for path in files
            if path.is_relative_to(SHARED_MEMORY) and len(path.parts) > 3
        }

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)

    def processor_s(self) -> float:
        """Processor time of the command's own process: a point of its start that does not depend on the machine's load."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def require_clean_end(self, shared: set[Path], end_s: float = END_S, *, killed: bool = False) -> None:
        """Within `end_s` all processes have ended and their files are removed; temporary folders may outlive a `killed` command."""
        until = time.monotonic() + end_s
        while left := self._left(shared, folders=not killed):
            assert time.monotonic() < until, f"{left}\n{self.log.read_text()}"
            self.process.poll()
            time.sleep(0.05)

    def _left(self, shared: set[Path], *, folders: bool) -> list[str]:
        commands = [_command(pid) for pid in self.pids()]
        temporary = [p for name in ("edge-fl-*", "pymp-*") for p in self.temporary.glob(name) if folders]
        return [
            *commands,
            *(str(path) for path in [*shared, *temporary] if path.exists()),
        ]

    def _owns(self, process: Path) -> bool:
        with suppress(OSError):
            return f"{VARIABLE}={self.mark}".encode() in (process / "environ").read_bytes()
        return False


def _unignore_interrupts() -> None:
    """Undo that a shell lets its background jobs, such as a CI script, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _command(pid: int) -> str:
    with suppress(OSError):
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return str(pid)


@contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[Command]:
    command = Command(arguments, folder)
    try:
        yield command
    finally:
        for pid in command.pids():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        command.process.wait()
        shutil.rmtree(command.temporary, ignore_errors=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_simulation_with_the_pool_engine_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with running([*SIMULATION, "--engine", "pool"], tmp_path) as command:
        command.wait_for(lambda: command.says("round 3/"))
        shared = command.shared()
        assert len(command.pids()) >= 2 + processes.cores() and shared
        os.kill(command.process.pid, number)
        command.require_clean_end(shared, killed=number == signal.SIGKILL)
        assert command.process.wait() == (-number if number == signal.SIGKILL else 130)
        assert not command.says("Traceback")


def test_an_interrupt_of_all_processes_prints_one_line(tmp_path: Path) -> None:
    with running([*SIMULATION, "--engine", "pool"], tmp_path) as command:
        command.wait_for(lambda: command.says("round 3/"))
        os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
        command.require_clean_end(set())
        assert command.says("edge-fl: interrupted") and not command.says("Traceback")


@pytest.mark.parametrize("processor_s", [1.0, 2.0])
def test_an_early_interrupt_gives_no_traceback(processor_s: float, tmp_path: Path) -> None:
    with running([*SIMULATION, "--engine", "pool"], tmp_path) as command:
        command.wait_for(lambda: command.processor_s() >= processor_s)
        os.killpg(command.process.pid, signal.SIGINT)
        command.require_clean_end(set())
        # by the signal if it came while a string was executed, as in dataclasses: Python then repeats it at its end
        assert command.process.wait() in (130, -signal.SIGINT)
        assert command.log.read_text().splitlines()[-1] == "edge-fl: interrupted"
        assert not command.says("Traceback")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_in_parallel_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    grid = ["compare", "--methods", "fedavg,fedprox", "--seeds", "2", "--jobs", "2", "--set", "rounds=100000"]
    with running(grid, tmp_path) as command:
        command.wait_for(lambda: len(command.pids()) >= 3)
        time.sleep(5)
        os.kill(command.process.pid, number)
        command.require_clean_end(command.shared(), killed=number == signal.SIGKILL)


@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_simulated_fleet_leaves_nothing(
    number: signal.Signals, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    fleet = ["fleet", "up", "--head", "2", "--full", "1", "--fleet", f"end-{number.name.lower()}", "--watch"]
    with running([*fleet, "--port", str(mosquitto.endpoint.port)], tmp_path) as command:
        command.wait_for(lambda: command.says("3/3 connected"))
        os.kill(command.process.pid, number)
        command.require_clean_end(command.shared(), killed=number == signal.SIGKILL)
        assert not command.says("Traceback")


@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_leaves_nothing(number: signal.Signals, mosquitto_program: Program, tmp_path: Path) -> None:
    with running(["demo", "--rounds", "100"], tmp_path) as command:
        command.wait_for(lambda: command.says("fleet  |") and command.says("round 1/"))
        os.kill(command.process.pid, number)
        command.require_clean_end(
            command.shared(), 3 * END_S, killed=number == signal.SIGKILL
        )  # three commands, in order
        assert not command.says("Traceback")


@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    ("server", "line"), [(["run", "demo"], "waiting for 4 full devices"), (["up"], "online, no release yet")]
)
def test_a_server_with_a_dashboard_leaves_nothing(
    server: list[str], line: str, number: signal.Signals, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    options = ["--fleet", f"{server[0]}-{number.name.lower()}", "--dashboard", "0"]
    where = ["--port", str(mosquitto.endpoint.port)]
    with running(["server", *server, *options, *where], tmp_path) as command:
        command.wait_for(lambda: command.says(line) and command.says("dashboard:"))
        os.kill(command.process.pid, number)
        command.require_clean_end(command.shared(), killed=number == signal.SIGKILL)
        assert not command.says("Traceback")


def test_a_script_without_a_main_guard_can_use_the_pool(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert [
        str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").iterdir()
    ] == done.stdout.splitlines()[-1:]
