"""A run that ends in any way leaves no process, shared memory, semaphore or temporary file: ways to end x engines x places.

The places are scripts without a main guard, `python -c`, `python -`, the command line and notebooks.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_fl_server.training.engines import folders
from tests.leftovers import START_S, Command, Traces, edge_fl, parent_of, running

SCRIPT = """
import signal
import sys
import numpy as np
from edge_fl.console import progress
from edge_fl_lab.research import run
from edge_fl_server.training.engines import simulated

def fail(number, frame):
    raise ValueError("on purpose")

signal.signal(signal.SIGUSR1, fail)
signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(0))
simulated.IN_MEMORY_BYTES = 0  # personal parts in files
progress.EVERY_S = 0.1
labels = np.arange(120) % 3
images = np.random.default_rng(0).random((120, 1, 8, 8))
run("fedrep", images, labels, clients=4, rounds=ROUNDS, engine=ENGINE, progress=True)
print("finished")
"""
FORK_SERVER, TRACKER = "multiprocessing.forkserver", "multiprocessing.resource_tracker"
FAIL, LEAVE = signal.SIGUSR1, signal.SIGUSR2

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(200),
]
slow = pytest.mark.slow


def script(engine: str = "pool", rounds: int = 100_000) -> str:
    return SCRIPT.replace("ROUNDS", str(rounds)).replace("ENGINE", repr(engine))


def first(number: signal.Signals) -> Callable[[Command], None]:
    """Send a signal to the first process."""
    return lambda command: os.kill(command.process.pid, number)


def everyone(number: signal.Signals) -> Callable[[Command], None]:
    """Send a signal to the process group, as a terminal or Jupyter does."""
    return lambda command: os.killpg(command.process.pid, number)


def twice(number: signal.Signals) -> Callable[[Command], None]:
    def send(command: Command) -> None:
        everyone(number)(command)
        time.sleep(0.2)
        everyone(number)(command)

    return send


def tracker_too(command: Command) -> None:
    """Kill the resource tracker, which removes semaphores, and then the first process."""
    for pid in command.named(TRACKER):
        os.kill(pid, signal.SIGKILL)
    first(signal.SIGKILL)(command)


WAYS: dict[str, Callable[[Command], None]] = {
    "exception": first(FAIL),
    "sys.exit": first(LEAVE),
    "SIGINT": first(signal.SIGINT),
    "Ctrl-C": everyone(signal.SIGINT),
    "Ctrl-C twice": twice(signal.SIGINT),
    "SIGTERM": first(signal.SIGTERM),
    "SIGTERM to all": everyone(signal.SIGTERM),
    "SIGTERM twice": twice(signal.SIGTERM),
    "SIGHUP to all": everyone(signal.SIGHUP),
    "SIGSEGV": first(signal.SIGSEGV),
    "SIGKILL": first(signal.SIGKILL),
    "SIGKILL to all": everyone(signal.SIGKILL),
    "SIGKILL, tracker too": tracker_too,
}
QUICK = {("pool", "SIGTERM"), ("pool", "SIGKILL to all"), ("sequential", "SIGKILL")}
IN_ONE_PROCESS = ("exception", "SIGINT", "SIGTERM", "SIGKILL")
IN_CI = {
    ("pool", "Ctrl-C twice"),
    ("pool", "SIGKILL, tracker too"),
    ("vector", "SIGKILL"),
}


def marks(case: tuple[str, str]) -> tuple[pytest.MarkDecorator, ...]:
    """A fast group, a sample for CI, and the rest nightly."""
    if case in QUICK:
        return ()
    return (slow,) if case in IN_CI else (slow, pytest.mark.nightly)


TABLE = [
    pytest.param(engine, way, marks=marks((engine, way)))
    for engine, ways in (("pool", WAYS), ("vector", IN_ONE_PROCESS), ("sequential", IN_ONE_PROCESS))
    for way in ways
]


@contextmanager
def script_running(folder: Path, engine: str = "pool") -> Iterator[Command]:
    (folder / "script.py").write_text(script(engine))
    with running([sys.executable, "script.py"], folder) as command:
        yield command


def require_files(traces: Traces, engine: str) -> set[Path]:
    """Check that there is something to remove; returns the files in shared memory."""
    shared = traces.shared()
    semaphores = [path for path in shared if path.name.startswith("sem.") and path.exists()]
    assert any(path.name.startswith(folders.PREFIX) for path in traces.folders())
    assert bool(shared) == bool(semaphores) == (engine == "pool")
    return shared


@pytest.mark.parametrize(("engine", "way"), TABLE)
def test_a_script_leaves_nothing(engine: str, way: str, tmp_path: Path) -> None:
    with script_running(tmp_path, engine) as command:
        command.wait_for(lambda: command.says("rounds: "))
        shared = require_files(command, engine)
        WAYS[way](command)
        command.require_clean_end(shared)


@slow
@pytest.mark.parametrize("place", [pytest.param("-c", marks=pytest.mark.nightly), "-"])
def test_a_program_without_a_file_leaves_nothing(place: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(script())
    arguments = ["-c", script()] if place == "-c" else ["-"]
    with running([sys.executable, *arguments], tmp_path, program) as command:
        command.wait_for(lambda: command.says("rounds: "))
        shared = require_files(command, "pool")
        os.kill(command.process.pid, signal.SIGTERM)
        command.require_clean_end(shared)


@pytest.mark.nightly  # tests/test_clean_exit.py has two of them in CI
@pytest.mark.parametrize("way", ["SIGINT", "Ctrl-C twice", "SIGTERM", "SIGTERM to all", "SIGKILL to all"])
def test_a_command_leaves_nothing(way: str, tmp_path: Path) -> None:
    simulation = ["simulate", "--clients", "4", "--set", "engine=pool", "--set", "evaluate_every=1"]
    with running(edge_fl(*simulation, "--set", "rounds=100000"), tmp_path) as command:
        command.wait_for(lambda: command.says("round 3/"))
        shared = require_files(command, "pool")
        WAYS[way](command)
        command.require_clean_end(shared)
        assert not command.says("Traceback")


@slow
@pytest.mark.parametrize(
    ("number", "delay_s"),
    [
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.nightly),
        (signal.SIGKILL, 1),
    ],
)
def test_an_end_during_the_start_of_the_pool_leaves_nothing(
    number: signal.Signals, delay_s: float, tmp_path: Path
) -> None:
    with script_running(tmp_path) as command:
        command.wait_for(lambda: bool(command.named(FORK_SERVER)))
        time.sleep(delay_s)
        shared = command.shared()
        os.kill(command.process.pid, number)
        command.require_clean_end(shared)


@slow
def test_a_killed_fork_server_is_replaced(tmp_path: Path) -> None:
    with script_running(tmp_path) as command:
        command.wait_for(lambda: command.says("rounds: "))
        before = command.named(FORK_SERVER)  # with its workers
        os.kill(next(pid for pid in before if parent_of(pid) == command.process.pid), signal.SIGKILL)
        command.wait_for(lambda: not set(before) & set(command.pids()))
        lines = command.output().count("rounds: ")
        command.wait_for(lambda: command.output().count("rounds: ") > lines + 2)
        shared = require_files(command, "pool")
        os.kill(command.process.pid, signal.SIGTERM)
        command.require_clean_end(shared)


class Notebook(Traces):
    """A Jupyter kernel."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        super().__init__()
        self.kernel = KernelManager(kernel_name="python3", connection_file=str(folder / "kernel.json"))
        self.kernel.start_kernel(env=os.environ | self.variables, cwd=str(folder))
        self.client = self.kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_S)

    def execute(self, code: str) -> None:
        self.client.execute(code, stop_on_error=False)  # a failure does not cancel the next request

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for an output with this content."""
        while True:
            content = self.client.get_iopub_msg(timeout=START_S)["content"]
            assert condition(content) or "ename" not in content, content
            if condition(content):
                return

    def kill(self) -> None:
        self.client.stop_channels()
        if self.kernel.has_kernel:
            self.kernel.shutdown_kernel(now=True)
        self.kernel.cleanup_resources()
        super().kill()


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.kill()


ENDS: dict[str, Callable[[Notebook], None]] = {
    "shut down": lambda notebook: notebook.kernel.shutdown_kernel(),
    "restarted": lambda notebook: notebook.kernel.restart_kernel(),
    "killed": lambda notebook: notebook.kernel.shutdown_kernel(now=True),
}


@slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
@pytest.mark.parametrize(
    ("engine", "end"),
    [
        pytest.param("pool", "shut down", marks=pytest.mark.nightly),
        pytest.param("pool", "restarted", marks=pytest.mark.nightly),
        ("pool", "killed"),
        pytest.param("vector", "killed", marks=pytest.mark.nightly),
    ],
)
def test_a_kernel_leaves_nothing(engine: str, end: str, notebook: Notebook) -> None:
    notebook.execute(script(engine))
    notebook.wait_for(lambda content: "rounds: " in content.get("text", ""))
    shared, before = require_files(notebook, engine), set(notebook.pids())
    ENDS[end](notebook)
    until = time.monotonic() + START_S
    while before & set(notebook.pids()) or any(path.exists() for path in [*shared, *notebook.folders()]):
        assert time.monotonic() < until, notebook.left(shared)
        time.sleep(0.05)
    assert bool(notebook.pids()) == (end == "restarted")


@slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
def test_an_interrupted_kernel_runs_again(notebook: Notebook) -> None:
    notebook.execute(script())
    notebook.wait_for(lambda content: "rounds: " in content.get("text", ""))
    notebook.kernel.interrupt_kernel()
    notebook.wait_for(lambda content: content.get("ename") == "KeyboardInterrupt")
    notebook.execute(script(rounds=2))
    notebook.wait_for(lambda content: "finished" in content.get("text", ""))
    shared = notebook.shared()
    notebook.kernel.shutdown_kernel()
    notebook.require_none(shared)
