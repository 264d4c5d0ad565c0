"""A crashed mosquitto is restarted, not for ever; a full disk is reported and does not end it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from edge_fl.errors import ConnectError
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Connected, Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_broker.provision.register_sync import RegisterSync
from edge_fl_broker.supervisor import RestartLimits, StopRequest, Supervisor
from tests.edge_fl.wire.brokers import held_port
from tests.edge_fl.wire.conftest import Recorder

pytestmark = pytest.mark.broker
RUNS = StopRequest()  # never set
WAIT_S = 60.0  # on a busy machine; every wait ends with its event
QUICK = RestartLimits(min_pause_s=0.01, max_pause_s=0.03, stable_s=3600.0, max_restarts=3)
UP = [sys.executable, "-m", "edge_fl", "broker", "up", "--insecure"]
FULL = b"\0" * 1024 * 1024


@pytest.fixture
def broker(tmp_path: Path, mosquitto_program: Program) -> Iterator[Mosquitto]:
    with Mosquitto(BrokerSettings(tmp_path / "broker", port=0), mosquitto_program) as broker:
        yield broker


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; tests that need one are skipped where this process may not mount one."""
    (folder := tmp_path / "small").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs root and tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def crash(broker: Mosquitto) -> None:
    os.kill(broker.pid, signal.SIGKILL)
    until = time.monotonic() + WAIT_S
    while not broker.has_ended():
        assert time.monotonic() < until
        time.sleep(0.01)


def fill(folder: Path) -> Path:
    """Use all space of a file system -> the file to delete."""
    with (path := folder / "fill").open("wb", buffering=0) as file:
        try:
            while file.write(FULL):
                pass
        except OSError:
            return path
    raise AssertionError


def test_a_killed_mosquitto_runs_again_and_clients_return(broker: Mosquitto) -> None:
    said: list[str] = []
    supervisor = Supervisor(broker, None, said.append, QUICK)
    client = MqttTransport(broker.endpoint, "client", None, heard := Recorder(), session_expiry_s=0)
    heard.next(Connected)
    supervisor.update(RUNS)
    assert not said
    crash(broker)
    supervisor.update(RUNS)
    assert len(said) == 2
    assert "killed by SIGKILL" in said[0] and "restart 1 of at most 3 in 0.01 s" in said[0]
    assert said[1] == f"mosquitto runs again on {broker.endpoint}"
    heard.next(Connected)
    client.close()


def test_pauses_double_and_repeated_crashes_end_it_with_the_reason(broker: Mosquitto) -> None:
    said: list[str] = []
    supervisor = Supervisor(broker, None, said.append, QUICK)
    for _ in range(3):
        crash(broker)
        supervisor.update(RUNS)
    assert [line.rpartition(" in ")[2] for line in said[::2]] == ["0.01 s", "0.02 s", "0.03 s"]
    assert said[0].startswith("mosquitto ended (killed by SIGKILL; nothing in its log);")
    assert all(line.startswith("mosquitto ended again, for the same reason;") for line in said[2::2])
    crash(broker)
    with pytest.raises(
        ConnectError, match=r"ended 4 times.*killed by SIGKILL.*mosquitto\.log; giving up"
    ) as caught:
        supervisor.update(RUNS)
    assert caught.value.exit_code == 2


def test_one_that_cannot_start_any_more_is_quoted(broker: Mosquitto) -> None:
    said: list[str] = []
    supervisor = Supervisor(broker, None, said.append, QUICK)
    crash(broker)
    broker.settings.config_path.write_text("no_such_option true\n")
    with pytest.raises(ConnectError, match=r"stopped at once: .*no_such_option"):
        for _ in range(4):
            supervisor.update(RUNS)
    assert len(said) == 3


def test_crashes_after_a_stable_time_are_counted_anew(broker: Mosquitto) -> None:
    said: list[str] = []
    supervisor = Supervisor(broker, None, said.append, RestartLimits(0.01, 1.0, stable_s=0.0, max_restarts=1))
    for _ in range(3):
        crash(broker)
        supervisor.update(RUNS)
    assert all("restart 1 of" in line for line in said[::2])


def test_the_pause_ends_with_the_command(broker: Mosquitto) -> None:
    said: list[str] = []
    (stopping := StopRequest()).set()
    crash(broker)
    Supervisor(broker, None, said.append, RestartLimits(min_pause_s=60.0)).update(stopping)
    assert len(said) == 1 and broker.has_ended()


def test_a_full_disk_is_reported_and_mosquitto_continues_and_saves_later(
    small_disk: Path, mosquitto_program: Program
) -> None:
    said: list[str] = []
    with Mosquitto(BrokerSettings(small_disk / "broker", port=0), mosquitto_program) as broker:
        supervisor = Supervisor(broker, None, said.append, QUICK)
        client = MqttTransport(broker.endpoint, "client", None, lambda event: None, session_expiry_s=0)
        client.publish(Packet("kept", b"!", retain=True))
        client.drain(WAIT_S)
        supervisor.update(RUNS)
        assert not said
        filling = fill(small_disk)
        for _ in range(3):
            supervisor.update(RUNS)
        assert len(said) == 1
        assert f"{broker.settings.folder}: disk full, 0 bytes free" in said[0]
        client.publish(Packet("kept", b"?", retain=True))
        client.drain(WAIT_S)
        crash(broker)
        supervisor.update(RUNS)
        assert said[-1].startswith("mosquitto runs again"), "also without space"
        filling.unlink()
        supervisor.update(RUNS)
        assert "mosquitto saves again" in said[-1]
        until = time.monotonic() + WAIT_S
        while not (broker.settings.folder / "mosquitto.db").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        client.close()


def test_on_a_full_disk_the_access_list_stays_and_is_replaced_later(
    small_disk: Path, mosquitto_program: Program, tmp_path: Path
) -> None:
    said: list[str] = []
    authority = Authority.make(tmp_path / "home")
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = register_sync.with_register(
        BrokerSettings(small_disk / "broker", port=0, certificates=certificates), authority
    )
    with Mosquitto(settings, mosquitto_program) as broker:
        supervisor = Supervisor(broker, RegisterSync(broker, authority), said.append, QUICK)
        filling = fill(small_disk)
        (claim,) = authority.claim({"pi-1": tmp_path / "pi-1"})
        for _ in range(3):
            supervisor.update(RUNS)
        assert len(said) == 2
        assert "No space left on device" in said[1]
        assert said[1].endswith("the previous access list stays in force; trying again")
        assert not broker.has_ended()
        filling.unlink()
        supervisor.update(RUNS)
        assert re.fullmatch(
            r"access list reloaded: rights by name: claim-\w+(; mosquitto was restarted.*)?", said[-1]
        )
        assert claim.name in broker.settings.access_path.read_text()


def test_nothing_is_started_on_a_full_disk(small_disk: Path, mosquitto_program: Program) -> None:
    fill(small_disk)
    settings = BrokerSettings(small_disk / "broker", port=0)
    with pytest.raises(ConnectError, match=r"No space left on device.*no broker was started") as caught:
        Mosquitto(settings, mosquitto_program).start()
    assert caught.value.exit_code == 2


def test_broker_up_restarts_a_killed_mosquitto(tmp_path: Path, mosquitto_program: Program) -> None:
    with (
        held_port() as port,
        subprocess.Popen(
            [*UP, "--port", str(port), "--dir", str(tmp_path)], stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert process.stderr
            lines = iter(process.stderr.readline, "")
            assert any("stop with Ctrl-C" in line for line in lines)
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
            assert any("killed by SIGKILL" in line and "restart 1 of" in line for line in lines)
            assert any("mosquitto runs again" in line for line in lines)
        finally:
            process.terminate()
            process.wait(WAIT_S)
    assert process.returncode == 0


@pytest.mark.parametrize("line", range(5))
def test_a_signal_may_interrupt_the_wait_at_any_line(line: int) -> None:
    stopping, lines = StopRequest(), iter(range(100))

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and next(lines) == line:
            stopping.set()  # where the interpreter would run the handler of the signal
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        stopping.wait(0.001)
    finally:
        sys.settrace(previous)
    assert stopping.wait(0.001)
