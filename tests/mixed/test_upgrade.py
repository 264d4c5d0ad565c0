"""edge-fl is upgraded while its fleet is online, over mosquitto with certificates: broker and server first, then the agents in stages.

The older agents' messages lack fields that the server knows; the newer server and the newer agents send one more field in every message.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest

from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import free_port
from edge_fl_devices.serving.predict import Predictor
from edge_fl_server.children import CommandProcesses
from tests import agents
from tests.agents import eventually
from tests.devices import graphs
from tests.mixed.closed_fleet import Machine, all_serve, boards

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]
NAMES = ("pi-1", "pi-2", "pi-3")
ENCODED = "    payload = msgspec.json.encode(message)\n"
OLDER = {
    "edge_fl/wire/messages.py": (
        ENCODED,
        '    fields = {key: value for key, value in msgspec.to_builtins(message).items() if key not in ("certificate_until", "drift")}\n'
        "    payload = msgspec.json.encode(fields)\n",
    )
}
NEWER = {
    "edge_fl/wire/messages.py": (
        ENCODED,
        '    payload = msgspec.json.encode({**msgspec.to_builtins(message), "added_later": {"limit": 1}})\n',
    )
}
NEWER_SERVER = """
import json
import edge_fl
edge_fl.__version__ = "0.3.0"
from edge_fl.wire import messages
encode = messages.encode
messages.encode = lambda message: json.dumps({**json.loads(encode(message)), "added_later": {"limit": 1}}).encode()
"""
"""Runs at every start of a Python that has its folder on the path, before any other module imports `encode`."""


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installation of boards that are one version behind."""
    folder = tmp_path_factory.mktemp("installation")
    return agents.factory(folder, agents.wheel(folder / "wheels", "0.0.9", OLDER))


def test_server_first_then_the_agents_in_stages(
    mosquitto_program: Program,
    factory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stack: ExitStack,
) -> None:
    lines: list[str] = []

    def children(**variables: str) -> CommandProcesses:
        on_line = lambda name, line: lines.append(f"{name}: {line}")  # noqa: E731
        return stack.enter_context(CommandProcesses(on_line, {"OMP_NUM_THREADS": "1", **variables}))

    machine = Machine(tmp_path / "server", free_port("127.0.0.1"), children(), capsys)
    machine.run("fleet enrol", "--baked", *NAMES)
    machine.start_broker()
    machine.start_server()
    there = boards(tmp_path / "boards", factory, machine, *NAMES)
    for board in there.values():
        stack.callback(board.stop)
        board.start()
    eventually(lambda: {row["device"] for row in machine.rows("fleet list")} >= {*NAMES}, "devices", 240)
    machine.store_release()
    machine.run("release rollout", "1", "--stages", "1")
    all_serve(machine, 1, *NAMES)
    before = {name: Predictor(board.home).predict(graphs.images(8)) for name, board in there.items()}

    machine.stop()  # the upgrade of broker and server
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "sitecustomize.py").write_text(NEWER_SERVER)
    machine.children = children(PYTHONPATH=str(tmp_path / "newer"))
    machine.start_broker()
    machine.start_server()
    all_serve(machine, 1, *NAMES)
    assert versions(machine) == dict.fromkeys(NAMES, "0.0.9")
    assert all(
        Predictor(board.home).predict(graphs.images(8)) == before[name] for name, board in there.items()
    )
    machine.store_release(1.5)  # older agents take a release from the newer server, and their reports count
    machine.run("release rollout", "2", "--stages", "1")
    all_serve(machine, 2, *NAMES)
    assert {row["device"] for row in machine.rows("release compare")} == {*NAMES}

    wheel = agents.wheel(tmp_path / "wheels", "0.3.0", NEWER)
    machine.run("release agent", str(wheel), "--stages", "0.3,1")
    eventually(lambda: versions(machine) == dict.fromkeys(NAMES, "0.3.0"), "all agents are updated", 240)
    all_serve(machine, 2, *NAMES)
    (row,) = machine.rows("release agents")
    assert (row["version"], row["state"], row["stage"]) == ("0.3.0", "completed", "2 of 2")
    machine.store_release(2.0)
    machine.run("release rollout", "3", "--stages", "1")
    all_serve(machine, 3, *NAMES)
    assert {row["standing"] for row in machine.rows("fleet list")} == {""}
    assert not [line for line in lines if any(word in line for word in ("unreadable", "forged", "rejected"))]


def versions(machine: Machine) -> dict[str, str]:
    return {row["device"]: row["agent"] for row in machine.rows("fleet list")}
