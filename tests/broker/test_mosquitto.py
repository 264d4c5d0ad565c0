"""A real mosquitto as a child process: start, failure messages, persistence, access list, end."""

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_fl.errors import ConnectError
from edge_fl.wire.mqtt.transport import Endpoint, MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Event, Packet
from edge_fl_broker.config import BrokerSettings, Certificates
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from tests.edge_fl.wire.brokers import refused

pytestmark = pytest.mark.broker
Issue = Callable[[str], tuple[Path, Path, Path]]
WAIT_S = 60.0  # on a busy machine; every wait ends with its event


class Ear:
    """A client that records received packets."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._heard: queue.SimpleQueue[Packet] = queue.SimpleQueue()
        self.transport = MqttTransport(endpoint, name, None, self._keep, session_expiry_s=0)
        self.transport.wait_connected(WAIT_S)

    def hear(self, wait_s: float = WAIT_S) -> str | None:
        """The topic of the next packet, or None."""
        try:
            return self._heard.get(timeout=wait_s).topic
        except queue.Empty:
            return None

    def _keep(self, event: Event) -> None:
        if isinstance(event, Packet):
            self._heard.put(event)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_it_runs_inside_the_block_and_not_after(tmp_path: Path, mosquitto_program: Program) -> None:
    with Mosquitto(BrokerSettings(tmp_path, port=0), mosquitto_program) as broker:
        pid = broker.pid
        assert broker.settings.port
        assert not broker.has_ended()
        socket.create_connection((broker.endpoint.host, broker.endpoint.port), timeout=WAIT_S).close()
    assert not is_alive(pid)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((broker.endpoint.host, broker.endpoint.port), timeout=WAIT_S)
    assert "terminating" in broker.log_path.read_text()


def test_a_port_that_is_taken_is_named(tmp_path: Path, mosquitto_program: Program) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConnectError, match=f"port {port} on 127.0.0.1: taken by another program.*--port"
        ) as caught:
            Mosquitto(BrokerSettings(tmp_path, port=port), mosquitto_program).start()
    assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_named(
    tmp_path: Path, mosquitto_program: Program, issue: Issue, host: str
) -> None:
    settings = BrokerSettings(tmp_path, host, certificates=Certificates(*issue("broker")))
    with pytest.raises(ConnectError, match=f"host {host}: .*, expected a name or address of this machine"):
        Mosquitto(settings, mosquitto_program).start()


def test_one_that_stops_at_once_is_quoted(tmp_path: Path, mosquitto_program: Program) -> None:
    nowhere = Certificates(*(tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")))
    with pytest.raises(ConnectError, match=r"stopped at once: .*Error.*mosquitto\.log"):
        Mosquitto(BrokerSettings(tmp_path, port=0, certificates=nowhere), mosquitto_program).start()


def test_what_is_retained_survives_a_stop(tmp_path: Path, mosquitto_program: Program) -> None:
    broker = Mosquitto(BrokerSettings(tmp_path, port=0), mosquitto_program)
    for _ in range(2):
        broker.start()
        ear = Ear(broker.endpoint, "ear")
        ear.transport.subscribe("kept")
        if not (first := broker.log_path.with_name("mosquitto.log.1")).exists():
            ear.transport.publish(Packet("kept", b"!", retain=True))
            ear.transport.drain(WAIT_S)
        assert ear.hear() == "kept"
        ear.transport.close()
        broker.stop()
    assert "terminating" in first.read_text(), "the log of the run before is kept"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path, mosquitto_program: Program) -> None:
    code = f"""
from pathlib import Path
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.mosquitto import Mosquitto
from tests.edge_fl.wire.brokers import refused
broker = Mosquitto(BrokerSettings(Path({str(tmp_path)!r}), port=0))
broker.start()
print(broker.pid, flush=True)
input()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin and parent.stdout
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    until = time.monotonic() + WAIT_S
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(pid)


def test_it_may_open_as_many_files_as_we_could(mosquitto: Mosquitto) -> None:
    limits = Path(f"/proc/{mosquitto.pid}/limits")
    if not limits.exists():
        pytest.skip("no /proc")
    (line,) = (line for line in limits.read_text().splitlines() if line.startswith("Max open files"))
    soft, hard = line.split()[3:5]
    assert soft == hard


def test_a_device_reaches_its_own_topics_and_no_others(
    tmp_path: Path, mosquitto_program: Program, issue: Issue, caplog: pytest.LogCaptureFixture
) -> None:
    """The access list as enforced by the broker, over TLS."""
    fleet = Topics("mill")
    settings = BrokerSettings(tmp_path, port=0, fleet="mill", certificates=Certificates(*issue("broker")))
    with Mosquitto(settings, mosquitto_program) as broker:

        def enter(name: str) -> Ear:
            return Ear(Endpoint("127.0.0.1", broker.settings.port, *issue(name)), "the certificate names me")

        server, pi, other = enter("server"), enter("pi-1"), enter("pi-2")
        server.transport.subscribe(fleet.up("+", "#"))
        for pattern in ("#", fleet.down("pi-1", "#"), fleet.down("pi-2", "#"), fleet.up("+", "#")):
            # granted, whatever they are
            pi.transport.subscribe(pattern)
        pi.transport.publish(Packet(fleet.up("pi-2", "state"), b"spoofed"))
        pi.transport.publish(Packet(fleet.down("pi-1", "assignment"), b"spoofed"))
        pi.transport.publish(Packet(fleet.server("state"), b"spoofed"))
        pi.transport.publish(Packet(fleet.chunk("0" * 64, 0), b"spoofed", retain=True))
        pi.transport.publish(Packet(fleet.up("pi-1", "state"), b"own"))
        assert server.hear() == fleet.up("pi-1", "state")
        pi.transport.drain(WAIT_S)
        assert caplog.text.count("the broker denied") == 4

        server.transport.publish(Packet(fleet.down("pi-2", "assignment"), b"not yours"))
        other.transport.publish(Packet(fleet.up("pi-2", "log"), b"not yours"))
        assert server.hear() == fleet.up("pi-2", "log")
        server.transport.publish(Packet(fleet.down("pi-1", "assignment"), b"yours"))
        assert pi.hear() == fleet.down("pi-1", "assignment")
        server.transport.publish(Packet(fleet.round("run_id"), b"everybody's"))
        while (topic := pi.hear()) == fleet.down("pi-1", "assignment"):
            pass  # once for each of its subscriptions
        assert topic == fleet.round("run_id")

        large = os.urandom(256 * 1024)  # more than one TLS record
        server.transport.publish(Packet(fleet.down("pi-1", "assignment"), large))
        assert pi.hear() == fleet.down("pi-1", "assignment")
        for ear in (server, pi, other):
            ear.transport.close()


def test_a_client_without_a_certificate_is_rejected(
    tmp_path: Path, mosquitto_program: Program, issue: Issue
) -> None:
    ca, cert, key = issue("broker")
    with Mosquitto(
        BrokerSettings(tmp_path, port=0, certificates=Certificates(ca, cert, key)), mosquitto_program
    ) as broker:
        for endpoint in (broker.endpoint, Endpoint("127.0.0.1", broker.settings.port)):
            stranger = MqttTransport(endpoint, "stranger", None, lambda event: None)
            assert "accepts 'stranger'" in refused(stranger)
            stranger.close()


def test_a_broker_of_another_ca_is_not_trusted(
    tmp_path: Path, mosquitto_program: Program, issue: Issue
) -> None:
    settings = BrokerSettings(tmp_path, port=0, certificates=Certificates(*issue("broker")))
    _, cert, _ = issue("another")  # a certificate, but not the CA's
    with Mosquitto(settings, mosquitto_program) as broker:
        careful = MqttTransport(
            Endpoint("127.0.0.1", broker.settings.port, ca=cert), "careful", None, lambda event: None
        )
        refused(careful, r"(?i)certificate verify failed")
        careful.close()
