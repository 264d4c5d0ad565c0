"""A command that ends in any way leaves no process, temporary folder, shared memory or semaphore."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.training.engines import processes
from tests.leftovers import END_S, edge_fl, running

SIMULATION = ["simulate", "--set", "rounds=100000", "--set", "evaluate_every=1", "--clients", "6"]
UNGUARDED = """
from edge_fl_server.orchestrate import run
from edge_fl_server.recipes.recipe import Recipe, with_settings

recipe = with_settings(Recipe(name="x"), ["engine=pool", "rounds=1", "source=simulated", "data.clients=4"])
print(run.run(recipe)[0].path)
"""

RUN = ["run", "demo"], "waiting for 4 full devices"
UP = ["up"], "online, no release yet"
LATER = pytest.mark.nightly
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.mark.parametrize("number", [TERM, pytest.param(INT, marks=LATER), pytest.param(KILL, marks=LATER)])
def test_a_simulation_with_the_pool_engine_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with running(edge_fl(*SIMULATION, "--set", "engine=pool"), tmp_path) as command:
        command.wait_for(lambda: command.says("round 3/"))
        shared = command.shared()
        assert len(command.pids()) >= 2 + processes.cores() and shared
        os.kill(command.process.pid, number)
        command.require_clean_end(shared)
        assert command.process.wait() == (-number if number == KILL else 128 + number)
        assert not command.says("Traceback")


def test_an_interrupt_of_all_processes_prints_one_line(tmp_path: Path) -> None:
    with running(edge_fl(*SIMULATION, "--set", "engine=pool"), tmp_path) as command:
        command.wait_for(lambda: command.says("round 3/"))
        os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
        command.require_clean_end(set())
        assert command.says("edge-fl: stopped by Ctrl-C") and not command.says("Traceback")


@pytest.mark.parametrize("processor_s", [1.0, pytest.param(2.0, marks=LATER)])
def test_an_early_interrupt_gives_no_traceback(processor_s: float, tmp_path: Path) -> None:
    with running(edge_fl(*SIMULATION, "--set", "engine=pool"), tmp_path) as command:
        command.wait_for(lambda: command.processor_s() >= processor_s)
        os.killpg(command.process.pid, signal.SIGINT)
        command.require_clean_end(set())
        # by the signal if it came while a string was executed, as in dataclasses: Python then repeats it at its end
        assert command.process.wait() in (130, -signal.SIGINT)
        assert command.output().splitlines()[-1] == "edge-fl: stopped by Ctrl-C"
        assert not command.says("Traceback")


@pytest.mark.parametrize("number", [pytest.param(TERM, marks=LATER), KILL])
def test_a_comparison_in_parallel_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    grid = ["compare", "--methods", "fedavg,fedprox", "--seeds", "2", "--jobs", "2", "--set", "rounds=100000"]
    with running(edge_fl(*grid), tmp_path) as command:
        command.wait_for(lambda: len(command.pids()) >= 3)
        time.sleep(5)
        os.kill(command.process.pid, number)
        command.require_clean_end(command.shared(), 3 * END_S)  # a worker notices when it has started


@pytest.mark.broker
@pytest.mark.parametrize("number", [pytest.param(TERM, marks=LATER), KILL])
def test_a_simulated_clients_leaves_nothing(
    number: signal.Signals, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    fleet = [
        "fleet",
        "up",
        "--head-only",
        "2",
        "--full",
        "1",
        "--fleet",
        f"end-{number.name.lower()}",
        "--watch",
    ]
    with running(edge_fl(*fleet, "--port", str(mosquitto.endpoint.port)), tmp_path) as command:
        command.wait_for(lambda: command.says("3/3 connected"))
        os.kill(command.process.pid, number)
        command.require_clean_end(command.shared())
        assert not command.says("Traceback")


@pytest.mark.broker
@pytest.mark.parametrize("number", [TERM, pytest.param(KILL, marks=LATER)])
def test_a_demo_leaves_nothing(number: signal.Signals, mosquitto_program: Program, tmp_path: Path) -> None:
    with running(edge_fl("demo", "--rounds", "100"), tmp_path) as command:
        command.wait_for(lambda: command.says("round 1/"))
        os.kill(command.process.pid, number)
        command.require_clean_end(command.shared(), 3 * END_S)  # three commands, in order
        assert not command.says("Traceback")


@pytest.mark.broker
@pytest.mark.parametrize(
    ("server", "line", "number"),
    [
        (*RUN, TERM),
        pytest.param(*RUN, KILL, marks=LATER),
        pytest.param(*UP, TERM, marks=LATER),
        (*UP, KILL),
    ],
)
def test_a_server_with_a_dashboard_leaves_nothing(
    server: list[str], line: str, number: signal.Signals, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    options = ["--fleet", f"{server[0]}-{number.name.lower()}", "--dashboard", "0"]
    where = ["--port", str(mosquitto.endpoint.port)]
    with running(edge_fl("server", *server, *options, *where), tmp_path) as command:
        command.wait_for(lambda: command.says(line) and command.says("dashboard:"))
        os.kill(command.process.pid, number)
        command.require_clean_end(command.shared())
        assert not command.says("Traceback")


def test_a_script_without_a_main_guard_can_use_the_pool(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [
        str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").iterdir()
    ] == done.stdout.splitlines()[-1:]
