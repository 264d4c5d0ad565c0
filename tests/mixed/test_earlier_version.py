"""Devices and servers of this version and of an earlier one, without agent updates, work together: over a real broker, both from wheels."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edge_fl.release.agent import AgentUpdate
from edge_fl.release.manifest import encode
from edge_fl_broker.config import Settings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.serving.served_model import serving
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from edge_fl_devices.update import environment
from tests import agents
from tests.agents import Board, eventually
from tests.devices import graphs
from tests.devices.site import samples
from tests.mixed.test_agent_updates import Site

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]
EARLIER = "f83b21f"
SERVER = """
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from edge_fl.release.manifest import decode
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import connected
from edge_fl_server.registry import Database
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.coordinator import RolloutCoordinator
folder, port = Path(sys.argv[1]), int(sys.argv[2])
connect = partial(MqttTransport, Endpoint("127.0.0.1", port))
with Journal(Database.open(folder / "registry.sqlite"), "agents") as journal, connected(connect, journal) as server:
    with closing(RolloutCoordinator(server, Repository(folder / "releases"))) as rollout:
        manifest = decode((folder / "manifest.json").read_bytes())
        rollout.roll_out(manifest, {manifest.extractor.sha256: (folder / "model.onnx").read_bytes()})
        print("heads without a report:", rollout.wait(1, 60), flush=True)
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    wheel = agents.earlier(folder, EARLIER)
    if wheel is None:
        pytest.skip(f"commit {EARLIER}: not in this checkout's history")
    return agents.factory(folder, wheel)


def test_an_earlier_device_works_with_this_server_and_is_not_asked_to_update(
    tmp_path: Path, earlier: Path, mosquitto_program: Program
) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(Mosquitto(Settings(tmp_path / "broker", port=0), mosquitto_program))
        site = Site(tmp_path, broker.endpoint.port, earlier, stack)
        site.board("old", earlier=True)
        site.boards_serve()
        assert (site.version("old"), site.status("old").state) == ("0.0.9", "none")
        assert site.update(agents.wheel(tmp_path, "0.2.0")) == "completed"
        topic = site.server.connection.topics.agent("old")
        site.server.connection.publish(topic, AgentUpdate("agent-1", 1), retain=True)  # as for a later agent
        board = site.boards["old"]
        board.stop()
        board.start()
        site.boards_serve()
        eventually(lambda: "dn/agent" in board.log.read_text(), "a warning")


def test_this_device_works_with_an_earlier_server(
    tmp_path: Path, earlier: Path, mosquitto_program: Program
) -> None:
    payload = graphs.graph()
    (tmp_path / "model.onnx").write_bytes(payload)
    (tmp_path / "manifest.json").write_bytes(encode(graphs.manifest_for(payload)))
    data = samples(60, 0)
    np.savez(tmp_path / "images.npz", x=data.x, y=data.y)
    with Mosquitto(Settings(tmp_path / "broker", port=0), mosquitto_program) as broker:
        port = broker.endpoint.port
        board = Board(
            tmp_path / "new", agents.factory(tmp_path / "installed"), "new", port, tmp_path / "images.npz"
        )
        board.start()
        try:
            command = [str(environment.python(earlier)), "-I", "-c", SERVER, str(tmp_path), str(port)]
            variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=150, check=False
            )
            assert done.stdout.strip() == "heads without a report: []", done.stderr[-2000:]
            eventually(lambda: serving(Store(board.home), Slots(board.home / "release")))
        finally:
            board.stop()
