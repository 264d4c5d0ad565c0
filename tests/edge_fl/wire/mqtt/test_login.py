"""A broker with TLS and passwords, as managed brokers have them: who is accepted, and what is said about the others."""

import logging
import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.errors import ConnectError
from edge_fl.wire import endpoint as endpoints
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Disconnected, Event
from edge_fl_broker.find import Program
from tests.edge_fl.wire.brokers import password_broker, refused
from tests.edge_fl.wire.test_login import write

pytestmark = pytest.mark.broker
Issue = Callable[[str], tuple[Path, Path, Path]]
USERS = {"fleet": "first word"}
WAIT_S = 60.0  # on a busy machine; every wait ends with its event


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, mosquitto_program: Program, issue: Issue
) -> Iterator[tuple[int, Path]]:
    """Port, and the CA of the broker's certificate."""
    certificate = issue("managed")
    with password_broker(tmp_path_factory.mktemp("managed"), mosquitto_program, certificate, USERS) as port:
        yield port, certificate[0]


@pytest.fixture
def system_ca(broker: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The broker's CA is one of this system's."""
    monkeypatch.setenv("SSL_CERT_FILE", str(broker[1]))
    endpoints._system_context.cache_clear()
    yield
    endpoints._system_context.cache_clear()


def connect(endpoint: Endpoint) -> tuple[MqttTransport, queue.SimpleQueue[Event]]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    return MqttTransport(endpoint, "client", None, events.put, session_expiry_s=0), events


def test_user_name_and_password_are_enough_with_a_ca_of_the_system(
    broker: tuple[int, Path], system_ca: None, tmp_path: Path
) -> None:
    client, _ = connect(identity.endpoint("127.0.0.1", broker[0], write(tmp_path / "id", USERS["fleet"])))
    client.wait_connected(WAIT_S)
    client.close()


def test_another_ca_is_a_file_of_the_folder(broker: tuple[int, Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "id", USERS["fleet"])
    stranger, _ = connect(identity.endpoint("127.0.0.1", broker[0], folder))
    refused(stranger, r"certificate verify failed.*signed by the CA in ca\.crt")
    stranger.close()
    (folder / "ca.crt").write_bytes(broker[1].read_bytes())
    client, _ = connect(identity.endpoint("127.0.0.1", broker[0], folder))
    client.wait_connected(WAIT_S)
    client.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_wrong_password_ends_every_command_with_one_line_and_code_2(
    broker: tuple[int, Path],
    system_ca: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "id", "guessed word")
    at = ["--host", "127.0.0.1", "--port", str(broker[0]), "--identity", "id"]
    here = ["--set", "broker.host=127.0.0.1", "--set", f"broker.port={broker[0]}", "--identity", "id"]
    for command in (
        ["broker", "check", *at],
        ["fleet", "list", *at],
        ["fleet", "up", "--head-only", "1", *at],
        ["server", "run", "demo", *here],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.count("does not accept") == 1
        assert re.search(r"rejected: [\w ]+ \(username and password are in id\); not connected", said)
    assert main(["device", "run", "--id", "pi-1", "--data", "folder:none", *at]) == 2
    assert "denies access to this device (rejected: " in capsys.readouterr().err
    assert "guessed" not in caplog.text


def test_no_user_name_at_all_is_named(broker: tuple[int, Path]) -> None:
    client, _ = connect(Endpoint("127.0.0.1", broker[0], broker[1]))
    with pytest.raises(ConnectError, match="neither a certificate nor a user name was sent"):
        client.wait_connected(WAIT_S)
    client.close()


def test_the_files_are_read_at_every_connection(
    broker: tuple[int, Path], system_ca: None, tmp_path: Path
) -> None:
    first, other = (write(tmp_path / name, USERS["fleet"]) for name in ("id", "other"))
    client, events = connect(identity.endpoint("127.0.0.1", broker[0], first))
    client.wait_connected(WAIT_S)
    write(first, "guessed word")
    rival, _ = connect(identity.endpoint("127.0.0.1", broker[0], other))  # the broker disconnects the client
    rival.wait_connected(WAIT_S)
    rejected = False
    while not rejected:
        event = events.get(timeout=WAIT_S)
        rejected = isinstance(event, Disconnected) and event.final
    for each in (client, rival):
        each.close()
