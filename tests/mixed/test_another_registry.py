"""A fleet stays with its registry: another one, and a mistyped fleet, are refused before anything is published."""

import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from edge_fl import cli
from edge_fl.cli import main
from edge_fl.errors import ConfigError
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.mqtt.connector import LIMITS, connector, server_state
from edge_fl_server.orchestrate.serving import FleetAccess, FleetServer
from edge_fl_server.registry import Database, fleets
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.commands import ReleaseCommands
from tests.devices import graphs
from tests.devices.scripted import eventually


@pytest.fixture
def port(mosquitto_program: Program, tmp_path: Path) -> Iterator[int]:
    with Mosquitto(BrokerSettings(tmp_path / "broker", port=0), mosquitto_program) as broker:
        yield broker.settings.port


@contextmanager
def served(server: FleetServer) -> Iterator[None]:
    stopping = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stopping,))
    thread.start()
    try:
        eventually(lambda: fleets.presence(server.db, server.access.fleet).online or not thread.is_alive())
        yield
    finally:
        stopping.set()
        thread.join(60)


@pytest.fixture
def first(port: int, tmp_path: Path) -> FleetServer:
    """A server that has served, and has a release."""
    db = Database.open(tmp_path / "server" / "registry.sqlite")
    server = FleetServer(FleetAccess(connector("127.0.0.1", port), "main", tmp_path / "home"), db)
    with served(server):
        pass

    Repository(tmp_path / "home" / "main").publish(graphs.manifest_for(graphs.graph(), release=1))
    return server


def test_another_registry_is_refused_until_it_is_told_to_adopt_the_fleet(
    first: FleetServer, tmp_path: Path
) -> None:
    other = replace(first, db=Database.open(tmp_path / "other.sqlite"))
    topics, before = Topics("main"), fleets.id_of(first.db, "main")
    with pytest.raises(
        ConfigError, match=rf"new; 0 devices, 0 releases.*registry {before}.*--adopt"
    ) as refused:
        other.serve(threading.Event())
    assert refused.value.exit_code == 4
    elsewhere = replace(
        other, access=replace(other.access, home=tmp_path / "elsewhere")
    )  # only the broker tells
    with pytest.raises(ConfigError, match=f"last server used registry {before}"):
        elsewhere.serve(threading.Event())
    commands = ReleaseCommands(other.access.connect, "main", tmp_path / "elsewhere", other.db)
    with pytest.raises(ConfigError, match="last server used registry"):
        commands.is_online()
    state = server_state(first.access.connect, topics, LIMITS)
    assert state and state.registry == before and not state.online
    with served(replace(other, access=replace(other.access, adopt=True))):
        state = server_state(first.access.connect, topics, LIMITS)
        assert state and state.registry == fleets.id_of(other.db, "main") != before
    with pytest.raises(ConfigError, match="is not the fleet's"):  # now it is the other one
        first.serve(threading.Event())


def test_an_empty_registry_is_not_the_fleets_where_only_the_releases_tell(
    first: FleetServer, port: int, tmp_path: Path
) -> None:
    (tmp_path / "home" / "main" / "registry").unlink()
    clear = connector("127.0.0.1", port)("other", None, lambda event: None)
    clear.wait_connected(30)

    clear.publish(Packet(Topics("main").server("state"), b"", retain=True))
    clear.drain(30)
    clear.close()
    empty = replace(first, db=Database.open(tmp_path / "empty.sqlite"))
    with pytest.raises(ConfigError, match="home/main has 1 release"):
        empty.serve(threading.Event())
    with served(first):
        assert fleets.id_of(first.db, "main")


NEW_FLEET = {
    *("broker up", "broker config", "broker check"),  # a broker comes before its fleet
    *("server run", "server up"),  # create it
    *("device run", "device doctor", "device watch", "fleet up", "flash"),  # devices wait for their server
}
"""Commands that take the name of a fleet that does not exist; their help says so."""
ROOT: Any = get_command(cli.load(metadata.entry_points(group=cli.ENTRY_POINTS)).root)


def commands_with_a_fleet(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands_with_a_fleet(inner, (*path, name))
    if any("--fleet" in parameter.opts for parameter in command.params):
        yield " ".join(path), command


def test_a_mistyped_fleet_is_named_with_the_nearest_by_every_command(
    first: FleetServer,
    port: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").touch()
    here = {
        "--fleet": "mian",
        "--home": str(tmp_path / "home"),
        "--database": str(tmp_path / "server" / "registry.sqlite"),
        "--port": str(port),
    }
    walked = set()
    for name, command in commands_with_a_fleet():
        if name in NEW_FLEET:
            continue
        known = {option for parameter in command.params for option in parameter.opts}
        given = [word for option, value in here.items() if option in known for word in (option, value)]
        if name == "server dashboard":
            given[given.index("--port") + 1] = "0"
        words = shlex.split(command.epilog.splitlines()[0])[1:]
        assert main([*words, *given]) == 4, name
        said = capsys.readouterr().err
        assert "fleet 'mian'" in said and "did you mean 'main'?" in said, (name, said)
        walked.add(name)
    assert len(walked) > 35
    assert not (tmp_path / "home" / "mian").exists()


def test_commands_that_take_a_new_fleet_say_so() -> None:
    helps = {
        name: parameter.help
        for name, command in commands_with_a_fleet()
        for parameter in command.params
        if "--fleet" in parameter.opts
    }
    assert {name for name, help in helps.items() if "new" in help} == NEW_FLEET


def test_a_server_says_that_a_fleet_is_new(
    first: FleetServer, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    access = FleetAccess(connector("127.0.0.1", port), "mian", tmp_path / "home")
    with served(FleetServer(access, first.db)):
        assert "fleet 'mian': a new one (did you mean 'main'?)" in capsys.readouterr().err
    with served(first):
        assert "a new one" not in capsys.readouterr().err


def test_commands_on_another_registry_change_nothing(
    first: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Database.open(tmp_path / "other.sqlite")
    fleets.claim(other, "main")
    where = ["--home", str(tmp_path / "home"), "--database", str(tmp_path / "other.sqlite")]
    assert main(["fleet", "group", "save", "all", "tier=head", *where]) == 4
    assert "is not the fleet's" in capsys.readouterr().err
