"""A mosquitto.db that a power cut damaged: set aside by name, and the broker starts; one that is only unreadable stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_fl.errors import ConnectError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings, Certificates
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import KEPT_DAMAGED, Mosquitto, free_port
from tests.accounts import account, reachable
from tests.broker.test_mosquitto import WAIT_S, Ear

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def saved(mosquitto_program: Program, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with ten retained messages."""
    folder = tmp_path_factory.mktemp("saved")
    with Mosquitto(BrokerSettings(folder, port=0), mosquitto_program) as broker:
        ear = Ear(broker.endpoint, "ear")
        for number in range(10):
            ear.transport.publish(Packet(f"kept/{number}", b"!" * 500, retain=True))
        ear.transport.drain(WAIT_S)
        ear.transport.close()
    return (folder / "mosquitto.db").read_bytes()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in half": lambda saved: saved[: len(saved) // 2],
    "without its end": lambda saved: saved[:-3],
    "cut in its header": lambda saved: saved[:10],
    "zeros": lambda saved: bytes(len(saved)),
    "other bytes": lambda saved: b"\xff" * len(saved),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_database_is_set_aside_and_named(
    tmp_path: Path, mosquitto_program: Program, saved: bytes, damage: str
) -> None:
    damaged, notices = DAMAGE[damage](saved), list[str]()
    (tmp_path / "mosquitto.db").write_bytes(damaged)
    with Mosquitto(BrokerSettings(tmp_path, port=0), mosquitto_program, notices.append) as broker:
        ear = Ear(broker.endpoint, "ear")
        ear.transport.publish(Packet("new", b"!", retain=True))
        ear.transport.drain(WAIT_S)
        ear.transport.close()
    [aside] = tmp_path.glob("mosquitto.db.damaged-*")
    assert aside.read_bytes() == damaged
    [notice] = notices
    assert str(tmp_path / "mosquitto.db") in notice and aside.name in notice and "publish" in notice
    with Mosquitto(BrokerSettings(tmp_path, port=0), mosquitto_program, notices.append):
        assert len(notices) == 1, "the new one is not damaged"


@pytest.mark.parametrize(
    ("content", "found"),
    [(lambda saved: b"", "it was empty"), (lambda saved: saved[:500] + bytes(4000), "chunk")],
)
def test_a_database_that_mosquitto_reads_only_in_part_is_named(
    tmp_path: Path,
    mosquitto_program: Program,
    saved: bytes,
    content: Callable[[bytes], bytes],
    found: str,
) -> None:
    (tmp_path / "mosquitto.db").write_bytes(content(saved))
    notices: list[str] = []
    with Mosquitto(BrokerSettings(tmp_path, port=0), mosquitto_program, notices.append):
        pass
    assert any(found in notice for notice in notices), notices


def test_only_the_newest_damaged_ones_are_kept(
    tmp_path: Path, mosquitto_program: Program, saved: bytes
) -> None:
    for _ in range(KEPT_DAMAGED + 2):
        (tmp_path / "mosquitto.db").write_bytes(saved[:-3])
        with Mosquitto(BrokerSettings(tmp_path, port=0), mosquitto_program, lambda line: None):
            pass
    assert len(list(tmp_path.glob("mosquitto.db.damaged-*"))) == KEPT_DAMAGED


def test_an_intact_database_stays_when_something_else_prevents_the_start(
    tmp_path: Path, mosquitto_program: Program, saved: bytes
) -> None:
    (tmp_path / "mosquitto.db").write_bytes(saved)
    nowhere = Certificates(*(tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")))
    with pytest.raises(ConnectError, match="stopped at once"):
        Mosquitto(BrokerSettings(tmp_path, port=0, certificates=nowhere), mosquitto_program).start()
    (tmp_path / "mosquitto.db").write_bytes(saved[:-3])
    with pytest.raises(ConnectError, match="stopped at once"):
        Mosquitto(BrokerSettings(tmp_path, port=0, certificates=nowhere), mosquitto_program).start()
    assert (tmp_path / "mosquitto.db").read_bytes() == saved[:-3]
    assert not list(tmp_path.glob("mosquitto.db.damaged-*"))


def test_a_running_broker_restarts_with_a_damaged_database(
    tmp_path: Path, mosquitto_program: Program, saved: bytes
) -> None:
    notices: list[str] = []
    with Mosquitto(BrokerSettings(tmp_path, port=0), mosquitto_program, notices.append) as broker:
        broker.kill()
        (tmp_path / "mosquitto.db").write_bytes(saved[:-3])
        broker.restart()
        assert not broker.has_ended() and len(notices) == 1


@pytest.mark.parametrize("foreground", [False, True])
def test_broker_up_starts_and_says_it(
    tmp_path: Path, mosquitto_program: Program, saved: bytes, foreground: bool
) -> None:
    (tmp_path / "mosquitto.db").write_bytes(saved[:-3])
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "edge_fl", "broker", "up", "--insecure", "--dir", str(tmp_path)]
    command += ["--port", str(port), *(["--foreground"] if foreground else [])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr
        try:
            lines = []
            for line in up.stderr:
                lines.append(line)
                if f"port {port}" in line or f":{port}" in line:
                    break
            assert any("set aside as mosquitto.db.damaged-" in line for line in lines), lines
            Ear(
                Endpoint("127.0.0.1", port), "ear"
            ).transport.close()  # in the foreground the line comes before mosquitto
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(WAIT_S)
    assert up.returncode == 0


def test_one_that_belongs_to_another_user_stays_and_is_named(tmp_path: Path, saved: bytes) -> None:
    folder = reachable(tmp_path)
    database = folder / "mosquitto.db"
    database.write_bytes(saved)
    database.chmod(0o600)
    code = (
        "import sys; from pathlib import Path; from edge_fl_broker.config import BrokerSettings;"
        " from edge_fl_broker.mosquitto import Mosquitto; Mosquitto(BrokerSettings(Path(sys.argv[1]), port=0)).start()"
    )
    with account() as user:
        os.chown(folder, user.uid, user.gid)
        failed = user.python("-c", code, folder, check=False)
    assert "mosquitto.db: not readable by this user" in failed.stderr
    assert database.read_bytes() == saved
