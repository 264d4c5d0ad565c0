"""A fleet on an MQTT 5 broker other than mosquitto: ejabberd, over TLS, with one user name and password for everybody."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_fl.errors import ConnectError
from edge_fl.wire import identity
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.checks import check, temporary_parties
from tests.edge_fl.wire.test_login import write
from tests.ejabberd import Ejabberd, EjabberdMissingError

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]
Issue = Callable[[str], tuple[Path, Path, Path]]
USER, PASSWORD = "fleet", "a word and another"
WAIT_S = 200


@pytest.fixture(scope="module")
def ejabberd(tmp_path_factory: pytest.TempPathFactory, issue: Issue) -> Iterator[Ejabberd]:
    _, certificate, key = issue("ejabberd")
    try:
        broker = Ejabberd(tmp_path_factory.mktemp("ejabberd"), certificate, key, USER, PASSWORD)
    except EjabberdMissingError as missing:
        pytest.skip(f"ejabberd: {missing}")
    with broker:
        yield broker


@pytest.fixture
def folder(tmp_path: Path, issue: Issue) -> Path:
    """An identity with user name and password, and the CA of the broker's certificate."""
    found = write(tmp_path / "account", PASSWORD, USER)
    (found / "ca.crt").write_bytes(issue("ejabberd-ca")[0].read_bytes())
    return found


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "edge_fl", *arguments, "--identity", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_a_fleet_trains_and_serves_over_it(ejabberd: Ejabberd, folder: Path) -> None:
    port = str(ejabberd.port)
    here = [
        f"--set={setting}"
        for setting in ("broker.host=127.0.0.1", f"broker.port={port}", "rounds=2", "cohort.min_devices=2")
    ]
    with (
        start(folder, "server", "run", "demo", *here) as server,
        start(
            folder,
            *(
                "fleet",
                "up",
                "--full",
                "2",
                "--head-only",
                "1",
                "--port",
                port,
                "--until-idle",
                "--format",
                "json",
            ),
        ) as fleet,
    ):
        try:
            server_said = server.communicate(timeout=WAIT_S)[1]
            printed, fleet_said = fleet.communicate(timeout=WAIT_S)
        finally:
            server.kill()
            fleet.kill()
    assert server.returncode == 0, server_said
    assert fleet.returncode == 0, fleet_said
    devices = json.loads(printed)
    assert {device["tier"] for device in devices} == {"full", "head"}
    assert all(device["accepted"] and not device["why"] for device in devices)
    assert all(device["release"] == 2 for device in devices if device["tier"] == "head")
    assert PASSWORD not in server_said + fleet_said + printed

    with start(folder, "fleet", "list", "--port", port, "--format", "json") as listed:
        rows = json.loads(listed.communicate(timeout=WAIT_S)[0])
    assert {row["device"] for row in rows} == {"sim-000", "sim-001", "sim-002"}


def test_it_has_what_devices_require(ejabberd: Ejabberd, folder: Path) -> None:
    endpoint = identity.endpoint("127.0.0.1", ejabberd.port, folder)
    found = {
        result.what: result for result in check(*temporary_parties(endpoint), "checked", deadline_s=30.0)
    }
    assert all(result.ok for result in found.values() if result.required)
    assert not found["shared subscriptions"].ok, "docs/brokers.md says so"


def test_a_wrong_password_is_rejected(ejabberd: Ejabberd, folder: Path) -> None:
    write(folder, "another word", USER)
    endpoint = identity.endpoint("127.0.0.1", ejabberd.port, folder)
    client = MqttTransport(endpoint, "client", None, lambda event: None, session_expiry_s=0)
    with pytest.raises(ConnectError, match=r"rejected: .*username and password are in"):
        client.wait_connected(60)
    client.close()
