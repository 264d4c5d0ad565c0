"""A wrong clock locks no device out that has an identity, opens no door, and is named where it is at fault."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edge_fl.wire.identity import Identity
from edge_fl.wire.mqtt import tls
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority

# The library, not the command `faketime`: that one fails where a process of the same number that was killed has left its semaphore.
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
needs_faketime = pytest.mark.skipif(
    not FAKETIME, reason="faketime is not installed (Debian package faketime)"
)

CONNECT = """
import sys
from pathlib import Path
from edge_fl.errors import ConnectError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport

ca, cert, key = (Path(name) if name else None for name in sys.argv[2:5])
client = MqttTransport(Endpoint("127.0.0.1", int(sys.argv[1]), ca, cert, key), "pi-1", None, lambda event: None, session_expiry_s=0)
said = "no attempt yet"
while "no attempt yet" in said:  # until the first attempt has ended
    try:
        client.wait_connected(0.1)
        said = "in"
    except ConnectError as error:
        said = str(error)
print(said)
client.close()
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("clocks") / "home")


@pytest.fixture(scope="module")
def pi(authority: Authority) -> Identity:
    (found,) = authority.bake({"pi-1": authority.home / "devices/pi-1"})
    return found


@pytest.fixture(scope="module")
def port(authority: Authority, mosquitto_program: Program) -> Iterator[int]:
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = BrokerSettings(authority.home.parent / "broker", port=0, certificates=certificates)
    with Mosquitto(settings, mosquitto_program) as broker:
        yield broker.settings.port


def connect_at(shift: str, port: int, found: Identity, *, own: bool = True) -> str:
    """What a process says whose clock is off by `shift`, when it connects with its identity, or with the CA alone."""
    ca, cert, key = (str(found.folder / name) for name in ("ca.crt", "client.crt", "client.key"))
    files = [ca, cert, key] if own else [ca, "", ""]
    command = [sys.executable, "-c", CONNECT, str(port), *files]
    clock = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    child = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **clock},
    )
    return child.stdout.strip() or child.stderr


@needs_faketime
@pytest.mark.broker
@pytest.mark.parametrize("shift", ["-50y", "-1h", "+2y"])
def test_a_device_connects_with_any_clock(port: int, pi: Identity, shift: str) -> None:
    assert connect_at(shift, port, pi) == "in"


@needs_faketime
@pytest.mark.broker
def test_a_clock_that_is_at_fault_is_named(port: int, pi: Identity) -> None:
    said = connect_at("-50y", port, pi, own=False)
    assert "not yet valid" in said and "this machine's clock says 19" in said
    said = connect_at("+9y", port, pi)
    assert "certificate has expired" in said and "this machine's clock says 203" in said


@needs_faketime
@pytest.mark.broker
def test_a_wrong_clock_lets_no_stranger_be_the_broker(port: int, tmp_path: Path) -> None:
    stranger = Authority.make(tmp_path / "strangers").bake({"pi-1": tmp_path / "pi-1"})[0]
    assert "certificate verify failed" in connect_at("-50y", port, stranger)


@needs_faketime
@pytest.mark.broker
def test_a_broker_whose_certificate_has_run_out_by_then_is_refused(port: int, authority: Authority) -> None:
    """The clock went back, but the device remembers a time at which the broker's certificate is over."""
    (found,) = authority.bake({"pi-2": authority.home / "devices/pi-2"})
    tls.record_time(found.folder, datetime.now(UTC) + timedelta(days=9 * 365))
    assert "the broker's certificate expired" in connect_at("-1h", port, found)


@pytest.mark.broker
def test_a_rejected_client_gets_its_certificates_dates(port: int, pi: Identity, tmp_path: Path) -> None:
    stranger = Authority.make(tmp_path / "strangers").bake({"pi-1": tmp_path / "pi-1"})[0]
    shutil.copy(pi.folder / "ca.crt", stranger.folder / "ca.crt")
    files = [str(stranger.folder / name) for name in ("ca.crt", "client.crt", "client.key")]
    command = [sys.executable, "-c", CONNECT, str(port), *files]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    assert "its certificate may be revoked, or of another fleet; it is valid from" in said


def test_the_last_time_is_kept_once_a_day(pi: Identity) -> None:
    now, path = datetime.now(UTC), pi.folder / tls.SEEN_FILE
    tls.record_time(pi.folder, now)
    tls.record_time(pi.folder, now + timedelta(hours=2))
    assert path.read_text() == now.isoformat()
    tls.record_time(pi.folder, now + timedelta(days=2))
    endpoint = pi.endpoint("127.0.0.1")
    assert tls.earliest(endpoint) == now + timedelta(days=2)
    path.write_text("spoilt")
    assert tls.earliest(endpoint) == pi.begins
    path.unlink()
