"""Power cuts at every step of an agent update: always a whole agent, the old or the new one, with the device's own files untouched."""

import inspect
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from edge_fl.release.agent import UpdateStatus
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.agent_update.launcher import MAX_STARTS
from edge_fl_devices.storage.store import Store
from tests import agents
from tests.agents import Board, eventually, own_files
from tests.mixed.test_agent_updates import AT_ONCE, Site, classes
from tests.power import fill

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = {
    "metadata verified": "create chunks/*",
    "half of the chunks": "change chunks/*:8",
    "chunks complete": "link 1/wheels/*",
    "environment begun": "create 1/pyvenv.cfg",
    "wheels installed": "create 1/lib/*/edge_fl_devices/cli.py",
    "environment complete": "create 1/complete",
    "canary begun": "run *canary_child*:1",
    "canary passed": "run *canary_child*:2",
}
"""Points in the old agent, by what happens below the folder of updates."""
STATES = ["switched", "trial counted", "new agent started", "new agent connected", "confirmed"]
"""Points that the state shows."""
HOOK = (
    f"""
{inspect.getsource(fill)}
"""
    + """
import os, signal, sys, threading, time
from fnmatch import fnmatch
FOLDER, STEP, FLAG, FULL = (os.environ.get(f"KILL_{name}", "") for name in ("FOLDER", "STEP", "FLAG", "FULL"))
PATTERN, _, NUMBER = STEP.partition(":")
SEEN = 0

def kill(event, arguments):
    global SEEN
    if event == "open":
        flags, path = arguments[2] or 0, arguments[0]
        if not flags & (os.O_WRONLY | os.O_RDWR) or not isinstance(path, (str, os.PathLike)):
            return
        verb = "create" if flags & os.O_CREAT else "change"
    elif event in ("os.rename", "os.link"):
        verb, path = "link", arguments[1]
    elif event == "subprocess.Popen":
        verb, path = "run", FOLDER + "/" + " ".join(map(str, arguments[1]))
    else:
        return
    path = os.fspath(path)
    if not isinstance(path, str) or not path.startswith(FOLDER + "/"):
        return
    name = path[len(FOLDER) + 1:]
    if fnmatch(f"{verb} {name}", PATTERN) or (verb == "create" and fnmatch(f"change {name}", PATTERN)):
        SEEN += 1
        if SEEN == int(NUMBER or 1) and not os.path.exists(FLAG):
            os.close(os.open(FLAG, os.O_CREAT | os.O_WRONLY))
            fill(FULL) if FULL else os.killpg(0, signal.SIGKILL)

if STEP:
    sys.addaudithook(kill)
"""
)


CASES = [
    pytest.param(point, seed, marks=() if (point, seed) == ("trial counted", 0) else pytest.mark.nightly)
    for seed in range(5)
    for point in [*STEPS, *STATES]
]


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agents.factory(tmp_path_factory.mktemp("installation"), hook=HOOK)


@pytest.mark.parametrize(("point", "seed"), CASES)
def test_a_power_cut_during_an_update_leaves_the_old_or_the_new_agent(
    tmp_path: Path, factory: Path, mosquitto_program: Program, point: str, seed: int
) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(
            Mosquitto(BrokerSettings(tmp_path / "broker", port=0), mosquitto_program)
        )
        site = Site(tmp_path, broker.endpoint.port, factory, stack)
        board = site.board("pi")
        site.boards_serve()
        eventually(lambda: not Store(board.home).outbox(), "acknowledged reports")
        board.stop()
        board.start()  # it trusts the root since its first release: only from now on does it note who signed
        eventually(lambda: Store(board.home).memory().key, "a verified assignment")
        eventually(lambda: starts(board) == 2, "the second start")
        board.stop()
        Store(board.home).keep_privacy_spent(b"spent")
        before, kept = classes(board), own_files(board.home)
        flag = tmp_path / "killed"
        if point in STEPS:
            variables = {"FOLDER": str(board.updates.home), "STEP": STEPS[point], "FLAG": str(flag)}
            board.environment = {f"KILL_{name}": value for name, value in variables.items()}
        board.start()
        site.boards_serve()
        wheel = agents.wheel(tmp_path, "0.2.0")
        site.commands.roll_out_agent([str(wheel)], AT_ONCE, downgrade=False)()
        if point in STEPS:
            eventually(flag.exists, point)
        else:
            eventually(lambda: reached(site, board, point), point)
        time.sleep(random.Random(seed).uniform(0, 0.3) if seed else 0)
        board.kill()
        assert own_files(board.home) == kept  # nothing of the device itself has changed
        assert classes(board) == before
        board.start()
        eventually(lambda: site.status("pi") == UpdateStatus(1, "agent-1", "done"), "the new agent")
        site.boards_serve()
        assert board.updates.state().starts <= MAX_STARTS
        board.stop()
        assert (own_files(board.home), classes(board)) == (kept, before)
        assert Store(board.home).memory().offered_agent == 1


def reached(site: Site, board: Board, point: str) -> bool:
    state = board.updates.state()
    match point:
        case "switched":
            return state.pending
        case "trial counted":
            return state.pending and state.starts == 1
        case "new agent started":
            return state.pending and starts(board) > 3
        case "new agent connected":
            return state.pending and site.version("pi") == "0.2.0"
    return state.last.state == "done"


def starts(board: Board) -> int:
    """How often an agent has counted its images at its start."""
    return board.log.read_text().count("samples to train on")
