"""Keys taken out, rotated and added from the command line; running devices follow over a real broker."""

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_fl.cli import main
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.registry import Database
from edge_fl_server.registry.database import location
from edge_fl_server.release import ownership
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.devices.scripted import TOPICS, eventually, running
from tests.devices.site import head_device

pytestmark = pytest.mark.broker


@pytest.fixture
def broker(mosquitto_program: Program, tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker:
        yield broker


def keys(home: Path, capsys: Any, *options: str) -> dict[str, list[dict[str, Any]]]:
    """The output of `release keys list` by role."""
    capsys.readouterr()
    order = ["release", "keys", "list", "--home", str(home), "--fleet", "test", "--format", "json"]
    assert main([*order, *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {role: [row for row in rows if row["role"] == role] for role in ("root", "timestamp")}


def test_devices_follow_keys_that_were_taken_out_rotated_and_added(
    broker: Mosquitto, tmp_path: Path, capsys: Any
) -> None:
    home, usb, safe = tmp_path / "home", tmp_path / "usb", tmp_path / "safe"
    connect = partial(MqttTransport, broker.endpoint)
    repository, transport = Repository(home / "test"), connect("publisher", None, lambda event: None)
    transport.wait_connected(60)
    for number in (1, 2):
        payload = graphs.graph(weights=graphs.WEIGHTS * number)
        manifest = graphs.manifest_for(payload, release=number)
        Publisher(transport, TOPICS, repository).publish(manifest, {manifest.extractor.sha256: payload})
    transport.close()
    with closing(Database.open(location("", home))) as db:
        ownership.take(db, "test", home)  # these releases were published without a registry
    at = ["--home", str(home), "--fleet", "test"]
    there = ["--host", "127.0.0.1", "--port", str(broker.endpoint.port)]
    rollout = ["release", "rollout", "--stages", "1", "--wait", "60", *at, *there]
    shipped = repository.root_bytes
    device = head_device(tmp_path / "pi-01", root=shipped, check=lambda found: None)

    def change(*words: str) -> int:
        return main(["release", "keys", *words, *at])

    with running(device, connect=connect):
        assert main([*rollout, "1"]) == 0
        assert device.state.release == 1

        before = keys(home, capsys)
        assert change("take-out", "root", "--out", str(usb)) == 0
        assert keys(home, capsys)["root"][0]["place"] == ""
        assert change("rotate", "timestamp") == 4
        assert "this private key is needed to sign, and is not here" in capsys.readouterr().err
        assert keys(home, capsys)["timestamp"] == before["timestamp"]

        for role in ("timestamp", "root"):
            assert change("rotate", role, "--with", str(usb)) == 0
        assert change("add", "root", "--threshold", "2", "--out", str(safe), "--with", str(usb)) == 0
        after = keys(home, capsys, "--with", str(usb), "--with", str(safe))
        assert [row["place"] for row in after["root"]] == [str(usb), str(safe)]
        assert {row["threshold"] for row in after["root"]} == {2}
        assert after["timestamp"][0]["key"] != before["timestamp"][0]["key"]
        assert change("rotate", "timestamp", "--with", str(usb)) == 4

        assert main([*rollout, "2"]) == 0
        eventually(lambda: device.state.release == 2, 30)
