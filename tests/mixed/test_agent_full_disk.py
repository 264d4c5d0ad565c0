"""A board's disk fills up during a step of an agent update: an agent keeps serving, the cause is reported, the update can complete."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.storage.store import Store
from tests import agents
from tests.agents import Board, eventually, own_files
from tests.chaos.test_agent_power_cuts import HOOK, STEPS
from tests.mixed.test_agent_updates import AT_ONCE, Site, classes
from tests.power import Disk, fill

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]
TRIAL = "new agent connected"
POINTS = {**STEPS, "switched": "create .state.json*:2", TRIAL: ""}
MEBIBYTES = 96


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agents.factory(tmp_path_factory.mktemp("installation"), hook=HOOK)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[pytest.mark.nightly] if point != "wheels installed" else [])
        for point in POINTS
    ],
)
def test_a_disk_that_fills_up_during_an_update_is_reported_while_an_agent_serves(
    tmp_path: Path, factory: Path, mosquitto_program: Program, point: str
) -> None:
    home, filler, flag = tmp_path / "pi", tmp_path / "pi/filler", tmp_path / "filled"
    home.mkdir()
    with Disk(tmp_path / "disk.img", home, MEBIBYTES), ExitStack() as stack:
        broker = stack.enter_context(
            Mosquitto(BrokerSettings(tmp_path / "broker", port=0), mosquitto_program)
        )
        site = Site(tmp_path, broker.endpoint.port, factory, stack)
        board = Board(home, factory, "pi", broker.endpoint.port, tmp_path / "images.npz")
        board.log.symlink_to(tmp_path / "log")  # as of the journal, which has a limit of its own
        stack.callback(board.stop)
        site.boards["pi"] = board
        board.start()
        site.boards_serve()
        board.stop()  # what is watched for are the steps of the update, not of the release's installation
        variables = {"FOLDER": board.updates.home, "STEP": POINTS[point], "FLAG": flag, "FULL": filler}
        board.update = {"confirm_s": 15.0 if point == TRIAL else 1.0}
        board.environment = {f"KILL_{name}": str(value) for name, value in variables.items()}
        board.start()
        eventually(lambda: board.log.read_text().count("samples to train on") == 2, "the second start")
        site.boards_serve()
        store = Store(board.home)
        store.keep_privacy_spent(b"spent")
        eventually(lambda: store.memory().done and not store.outbox(), "the report is acknowledged")
        eventually(lambda: store.memory().key, "a verified assignment")
        before, kept = classes(board), own_files(board.home)
        wheel = agents.wheel(tmp_path, "0.2.0")
        site.commands.roll_out_agent([str(wheel)], AT_ONCE, downgrade=False)()
        if point == TRIAL:
            eventually(lambda: site.version("pi") == "0.2.0", point)
            fill(str(filler))
        else:
            eventually(flag.exists, point)
        eventually(lambda: site.status("pi").why.startswith("enospc: "), "the cause")
        site.boards_serve()
        assert (own_files(board.home), classes(board)) == (kept, before)
        filler.unlink()
        if point != TRIAL:  # a trial is confirmed once there is space
            assert site.status("pi").state == "failed"
            site.commands.roll_out_agent([str(wheel)], AT_ONCE, downgrade=False)()
        eventually(lambda: site.status("pi").state == "done" and site.version("pi") == "0.2.0", "the update")
        site.boards_serve()
        assert (own_files(board.home), classes(board)) == (kept, before)
