"""A device has the name on its certificate; a simulated fleet takes its names from the given identities."""

import queue
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.errors import ConfigError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connected, Disconnected, Packet, Transport
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices import config
from edge_fl_devices.runtime.connection import connector, fleet_connector
from tests.edge_fl.wire.conftest import Recorder


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "home")


def test_the_name_on_the_certificate_is_the_device(authority: Authority, tmp_path: Path) -> None:
    authority.bake({"pi-1": tmp_path / "pi-1"})
    authority.claim({"pi-2": tmp_path / "pi-2"})
    for name in ("pi-1", "pi-2"):
        settings: dict[str, object] = {"data": "d", "broker": {"identity": str(tmp_path / name)}}
        assert config.with_certificate_name(settings, "here")["id"] == name
        with pytest.raises(ConfigError, match=f"here: id = 'other', but the identity .* is that of '{name}'"):
            config.with_certificate_name({**settings, "id": "other"}, "here")
    assert config.with_certificate_name({"id": "pi-3"}, "here") == {"id": "pi-3"}


def test_a_fleet_takes_the_devices_among_the_identities_in_order(
    authority: Authority, tmp_path: Path
) -> None:
    folder = tmp_path / "ids"
    authority.bake({name: folder / name for name in ("pi-2", "pi-1", "pi-3")})
    authority.claim({"pi-0": folder / "pi-0"})
    assert fleet_connector("127.0.0.1", 0, folder, 2)[0] == ("pi-1", "pi-2")
    with pytest.raises(
        ConfigError, match=r"3 identities of devices, expected 4.*fleet enrol --baked --count 4"
    ):
        fleet_connector("127.0.0.1", 0, folder, 4)


def test_a_missing_identity_is_one_line_and_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere")
    for command in (
        ["device", "run", "--data", "d.npz", "--identity", nowhere],
        ["fleet", "list", "--identity", nowhere],
        ["server", "run", "demo", "--identity", nowhere],
    ):
        assert main(command) == 4
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.broker
def test_devices_of_two_fleets_may_have_one_name_on_one_broker(mosquitto: Mosquitto) -> None:
    """Session, queued messages and will are each device's own."""
    name, heard = "sim-001", {fleet: Recorder() for fleet in ("one", "two")}
    wills = {fleet: Packet(Topics(fleet).up(name, "state"), fleet.encode()) for fleet in heard}
    watcher_heard = Recorder()
    watcher = MqttTransport(mosquitto.endpoint, "will-watcher", None, watcher_heard, session_expiry_s=0)
    for will in wills.values():
        watcher.subscribe(will.topic)
    watcher.drain(10)

    def join(fleet: str) -> Transport:
        device = connector(mosquitto.endpoint, fleet)(name, wills[fleet], heard[fleet])
        device.wait_connected(10)
        return device

    one, two = join("one"), join("two")
    assert not heard["one"].next(Connected).session_present
    one.subscribe(Topics("one").down(name, "#"))
    one.drain(10)
    two.publish(Packet(Topics("two").up(name, "log"), b""))
    two.drain(10)
    with pytest.raises(queue.Empty):
        heard["one"].next(Disconnected, 0.5)
    one.close(clean=False)
    assert watcher_heard.next(Packet).payload == b"one"
    two.publish(Packet(Topics("one").down(name, "cmd"), b"queued"))
    two.drain(10)
    again = join("one")
    assert heard["one"].next(Connected).session_present
    assert heard["one"].next(Packet).payload == b"queued"
    for client in (again, two, watcher):
        client.close()


def test_a_certificate_names_the_client(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("ca", "cert", "key")]
    assert Endpoint("broker.example", 8883, *files).client_id("mill", "pi-1") == "pi-1"
    assert Endpoint("broker.example").client_id("mill", "pi-1") == "mill_pi-1"


def test_one_certificate_is_not_for_a_fleet(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority.bake({"pi-1": tmp_path / "pi-1"})
    assert main(["fleet", "up", "--head-only", "1", "--identity", str(tmp_path / "pi-1")]) == 4
    assert "a certificate for 'pi-1' alone" in capsys.readouterr().err
