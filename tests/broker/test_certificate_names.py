"""A broker's certificate without the host that devices use: who says so, and the renewal that devices do not notice."""

import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.errors import ConnectError
from edge_fl.wire import identity
from edge_fl.wire.identity import Identity
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Connected, Event
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto, free_port
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_broker.provision.register_sync import RegisterSync
from edge_fl_devices.config import convert
from edge_fl_devices.doctor import run_checks

pytestmark = pytest.mark.broker
ELSEWHERE = "127.0.0.2"  # loopback, and not in a certificate
WAIT_S = 60.0


class Site:
    def __init__(self, folder: Path, program: Program) -> None:
        self.home = folder / "home"
        self.authority = Authority.make(self.home)
        (self.device,) = self.authority.bake({"pi-1": self.home / "devices/pi-1"})
        certificates = register_sync.certificates(self.authority, "127.0.0.1")
        settings = BrokerSettings(folder / "broker", "0.0.0.0", 0, certificates=certificates)
        self.broker = Mosquitto(register_sync.with_register(settings, self.authority), program)
        self.broker.start()
        self.sync = RegisterSync(self.broker, self.authority)

    @property
    def port(self) -> int:
        return self.broker.settings.port


@pytest.fixture
def site(tmp_path: Path, mosquitto_program: Program) -> Iterator[Site]:
    site = Site(tmp_path, mosquitto_program)
    yield site
    site.broker.stop()


def failure(device: Identity, host: str, port: int) -> str:
    """Why the first attempt of a device fails."""
    client = MqttTransport(device.endpoint(host, port), device.name, None, lambda event: None)
    try:
        reason = "no attempt yet"
        while "no attempt yet" in reason:
            try:
                client.wait_connected(0.1)
                return ""
            except ConnectError as error:
                reason = str(error)
        return reason
    finally:
        client.close()


def test_a_device_names_what_the_certificate_has_and_what_it_wanted(site: Site) -> None:
    reason = failure(site.device, ELSEWHERE, site.port)
    assert "127.0.0.1" in reason and "localhost" in reason, reason
    assert f"not for '{ELSEWHERE}'" in reason
    assert f"edge-fl broker certificate --add {ELSEWHERE}" in reason


def test_doctor_names_them_with_the_command(site: Site, tmp_path: Path) -> None:
    broker = {"host": ELSEWHERE, "port": site.port, "identity": str(site.device.folder)}
    config = convert({"id": "pi-1", "data": "folder:/", "folder": str(tmp_path), "broker": broker}, "test")
    found = {result.check: result for result in run_checks(config, only=["network"])}
    assert found["TLS"].state == "failed" and "is valid for" in found["TLS"].found
    assert f"edge-fl broker certificate --add {ELSEWHERE}" in found["TLS"].remedy


def test_a_renewal_reaches_a_waiting_device_that_changes_nothing(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
    ca = (site.home / "ca.crt").read_bytes()
    client = MqttTransport(site.device.endpoint(ELSEWHERE, site.port), "pi-1", None, heard.put)
    try:
        assert main(["broker", "certificate", "--add", ELSEWHERE, "--identities", str(site.home)]) == 0
        shown = capsys.readouterr()
        assert ELSEWHERE in shown.out and "127.0.0.1" in shown.out
        assert f"also for {ELSEWHERE}" in shown.err
        assert (site.sync.update() or "").startswith("certificate reloaded: mosquitto was restarted for it")
        assert not site.sync.update()
        assert isinstance(heard.get(timeout=WAIT_S), Connected)
    finally:
        client.close()
    assert (site.home / "ca.crt").read_bytes() == ca
    assert failure(site.device, "127.0.0.1", site.port) == "", "earlier names stay"


def test_the_command_without_a_host_changes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    before = (site.home / "broker/client.crt").read_bytes()
    assert main(["broker", "certificate", "--identities", str(site.home), "--format", "json"]) == 0
    assert "localhost" in capsys.readouterr().out
    assert main(["broker", "certificate", "--add", "localhost", "--identities", str(site.home)]) == 0
    assert (site.home / "broker/client.crt").read_bytes() == before
    assert main(["broker", "certificate", "--add", "no host", "--identities", str(site.home)]) == 4


def test_a_running_broker_renews_its_certificate_in_time(site: Site) -> None:
    expires = site.authority.broker_identity().expires
    site.authority.now = lambda: site.authority.broker_identity().renew_at  # type: ignore[method-assign]
    assert (site.sync.update() or "").startswith("certificate reloaded: mosquitto was restarted for it")
    assert site.authority.broker_identity().expires > expires


def test_broker_up_says_for_what_its_certificate_is_valid_and_what_is_missing(
    tmp_path: Path, site: Site, mosquitto_program: Program
) -> None:
    folder, port = site.home / "broker", free_port("127.0.0.1")
    files = ["--ca", "ca.crt", "--cert", "client.crt", "--key", "client.key"]
    options = [str(folder / each) if each.count(".") else each for each in files]
    given = ["--listen", ELSEWHERE, *options]
    for arguments, missing in (
        (given, True),
        (["--listen", ELSEWHERE, "--identities", str(site.home)], False),
    ):
        command = [sys.executable, "-m", "edge_fl", "broker", "up", "--port", str(port), *arguments]
        command += ["--dir", str(tmp_path / "other")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
            assert up.stderr
            try:
                lines = [up.stderr.readline()]
                while f":{port}" not in lines[-1]:
                    lines.append(up.stderr.readline())
            finally:
                up.send_signal(signal.SIGTERM)
                up.wait(WAIT_S)
        assert "is valid for" in lines[0] and "localhost" in lines[0], "before anything is started"
        assert (f"devices cannot connect to {ELSEWHERE}" in lines[0]) is missing


@pytest.mark.parametrize("stored", [True, False])
def test_flash_compares_the_host_before_anything_is_written(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: bool
) -> None:
    """With the certificate beside the identity, or only with that of the running broker."""
    folder = site.device.folder
    if not stored:
        folder = tmp_path / "copied" / "here" / "pi-1"
        site.authority.bake({"pi-2": folder})
        assert identity.read(folder).name == "pi-2"
    name = identity.read(folder).name
    out = tmp_path / "bundle"
    command = [
        "flash",
        "--id",
        name,
        "--out",
        str(out),
        "--identity",
        str(folder),
        "--port",
        str(site.port),
    ]
    assert main([*command, "--host", ELSEWHERE]) == 4
    shown = capsys.readouterr().err
    assert f"edge-fl broker certificate --add {ELSEWHERE}" in shown and "nothing was written" in shown
    assert not out.exists()
