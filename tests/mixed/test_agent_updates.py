"""Agents update themselves from signed wheels over a real broker: in stages, and back by themselves from a bad one."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_fl.release.agent import UpdateStatus
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import Store
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server, connected
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.commands import ReleaseCommands
from edge_fl_server.release.rollout.coordinator import CoordinatorOptions, RolloutCoordinator
from edge_fl_server.release.rollout.director import Director
from tests import agents
from tests.agents import Board, eventually
from tests.devices import graphs
from tests.devices.site import samples

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]
BAD = {
    "crash_loop": agents.CRASHES,
    "not_connected": agents.UNCONNECTED,
    "canary_failed": agents.OTHER_CLASSES,
}
FLEET = "agents"
AT_ONCE = RolloutConfig(stages=(1.0,), stage_wait_s=120)
STAGED = RolloutConfig(stages=(0.05, 1.0), stage_wait_s=120)


class Site:
    """A broker and a server with one release of a small extractor; boards are added to it."""

    def __init__(self, folder: Path, port: int, factory: Path, stack: ExitStack) -> None:
        self.folder, self.factory, self.port, self._stack = folder, factory, port, stack
        self.boards: dict[str, Board] = {}
        data = samples(60, 0)
        np.savez(folder / "images.npz", x=data.x, y=data.y)
        self.db = Database.open(folder / "home" / "registry.sqlite")
        stack.callback(self.db.close)
        self.connect = partial(MqttTransport, agents.endpoint(port))
        journal = stack.enter_context(Journal(self.db, FLEET))
        self.repository = Repository(folder / "home" / FLEET)
        director = Director(self.repository, FLEET)
        self.server: Server = stack.enter_context(
            connected(ServerConnection(self.connect, journal, director=director))
        )
        self.rollout = RolloutCoordinator(self.server, self.repository, CoordinatorOptions(resume=True))
        stack.enter_context(closing(self.rollout))
        payload = graphs.graph()
        manifest = graphs.manifest_for(payload)
        self.rollout.roll_out(manifest, {manifest.extractor.sha256: payload})

    @property
    def commands(self) -> ReleaseCommands:
        return ReleaseCommands(self.connect, FLEET, self.folder / "home", self.db)

    def board(self, name: str, **update: object) -> Board:
        board = Board(self.folder / name, self.factory, name, self.port, self.folder / "images.npz")
        board.update = update
        self.boards[name] = board
        self._stack.callback(board.stop)
        board.start()
        return board

    def boards_serve(self) -> None:
        for name in self.boards:
            eventually(lambda name=name: self.release_of(name) == 1, f"{name} serves")

    def release_of(self, name: str) -> int:
        device = self.server.roster.get(name)
        return device.state.release if device and device.state and device.ready else 0

    def status(self, name: str) -> UpdateStatus:
        device = self.server.roster.get(name)
        found = device.capability.update if device and device.capability else None
        return found or UpdateStatus(0, state="none")

    def version(self, name: str) -> str:
        device = self.server.roster.get(name)
        return device.capability.agent if device and device.capability else ""

    def update(self, *wheels: Path, plan: RolloutConfig = AT_ONCE, downgrade: bool = False) -> str:
        """Roll wheels out as the command does -> the state of the roll-out."""
        request = self.commands.roll_out_agent([str(path) for path in wheels], plan, downgrade=downgrade)
        return self.commands.carry_out(request, print, 300).state


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agents.factory(tmp_path_factory.mktemp("installation"))


@pytest.fixture
def site(tmp_path: Path, factory: Path, mosquitto_program: Program) -> Iterator[Site]:
    with ExitStack() as stack:
        broker = stack.enter_context(
            Mosquitto(BrokerSettings(tmp_path / "broker", port=0), mosquitto_program)
        )
        yield Site(tmp_path, broker.endpoint.port, factory, stack)


def classes(board: Board) -> list[str]:
    return [label for label, _ in Predictor(board.home).predict(graphs.images(8))]


def test_a_device_updates_itself_and_keeps_everything_unless_its_owner_declines_or_postpones(
    site: Site, tmp_path: Path
) -> None:
    board = site.board("pi")
    site.board("declines", automatic=False)
    site.board("later", delay_h=1.0)
    site.boards_serve()
    before, head = classes(board), (board.home / "heads").stat().st_ino
    good = agents.wheel(tmp_path / "wheels", "0.2.0")
    assert good.stat().st_size < 3_000_000
    site.commands.roll_out_agent([str(good)], AT_ONCE, downgrade=False)()
    eventually(lambda: site.status("pi") == UpdateStatus(1, "agent-1", "done"), "the update")
    eventually(lambda: site.version("pi") == "0.2.0")
    site.boards_serve()
    assert Store(board.home).memory().signed_update  # a broker could not have forged the request
    assert (classes(board), (board.home / "heads").stat().st_ino) == (before, head)
    eventually(lambda: site.status("later").state == "postponed")
    assert site.status("later").why.startswith("until ")
    assert site.status("declines") == UpdateStatus(0, state="declined")
    board.stop()
    board.start()
    eventually(lambda: site.release_of("pi") == 1 and site.version("pi") == "0.2.0")


@pytest.mark.parametrize(
    "why", [pytest.param(why, marks=() if why == "crash_loop" else pytest.mark.nightly) for why in BAD]
)
def test_a_bad_agent_is_stopped_in_the_first_stage_and_returns_by_itself(
    site: Site, tmp_path: Path, why: str
) -> None:
    for number in range(4):
        site.board(f"pi-{number}", trial_s=12.0 if why == "not_connected" else 60.0)
    site.boards_serve()
    before = {name: classes(board) for name, board in site.boards.items()}
    assert site.update(agents.wheel(tmp_path / "wheels", "0.2.0", BAD[why]), plan=STAGED) == "aborted"
    eventually(lambda: all(site.release_of(name) == 1 for name in site.boards), "all serve")
    statuses = [site.status(name) for name in site.boards]
    assert all(status.number == 0 for status in statuses)
    assert [status.id for status in statuses].count("") == 1  # outside of the first stage
    eventually(lambda: site.commands.agent_rows()[0]["flags"] == "withdrawn")
    (row,) = site.commands.agent_rows()
    assert row["state"] == "aborted" and why in str(row["reason"])
    assert {name: classes(board) for name, board in site.boards.items()} == before
