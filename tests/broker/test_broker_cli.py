"""`edge-fl broker`: what it prints, and its exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.wire import identity
from edge_fl.wire.identity import Identity
from edge_fl.wire.mqtt.transport import Endpoint, MqttTransport
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from tests.edge_fl.wire.brokers import held_port, refused

pytestmark = pytest.mark.broker


def test_config_prints_what_up_would_run_with(
    tmp_path: Path, mosquitto_program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere"
    assert main(["broker", "config", "--insecure", "--port", "1999", "--dir", str(nowhere)]) == 0
    printed = capsys.readouterr().out
    assert "listener 1999 127.0.0.1" in printed
    assert str(mosquitto_program.path) in printed
    assert not nowhere.exists()


def test_config_shows_the_access_list_that_tls_brings(
    tmp_path: Path, mosquitto_program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"--{name}={tmp_path / name}" for name in ("ca", "cert", "key")]
    assert main(["broker", "config", "--listen", "0.0.0.0", "--fleet", "mill", *files]) == 0
    assert "pattern write efl/1/mill/d/%u/up/#" in capsys.readouterr().out


def test_check_lists_findings_as_json(mosquitto: Mosquitto, capsys: pytest.CaptureFixture[str]) -> None:
    main(["broker", "check", "--insecure", "--port", str(mosquitto.endpoint.port), "--format", "json"])
    findings = json.loads(capsys.readouterr().out)
    assert {finding["what"] for finding in findings} >= {"packet size", "sessions"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["check", "--insecure", "--port", "{free}", "--wait", "3"], 2, "Connection refused"),
        (["up", "--insecure", "--port", "{taken}"], 2, "taken by another program"),
        (["up", "--insecure", "--listen", "0.0.0.0"], 4, "loopback only"),
        (["up"], 4, "use --insecure for plaintext on loopback"),
        (["up", "--ca", "ca.pem"], 4, "--ca, --cert and --key together"),
        (["up", "--port", "70000"], 4, "65535"),
        (["up", "--insecure", "--fleet", "Upper"], 4, "--fleet Upper"),
    ],
)
def test_what_cannot_be_is_one_line_and_an_exit_code(
    mosquitto_program: Program,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other, held_port() as free:
        ports = {"free": free, "taken": other.getsockname()[1]}
        assert main(["broker", *(argument.format(**ports) for argument in arguments)]) == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.fixture
def port() -> Iterator[int]:
    """A port on loopback that no other program gets."""
    with held_port() as port:
        yield port


@pytest.mark.parametrize("foreground", [False, True])
def test_up_serves_until_sigterm(
    tmp_path: Path, mosquitto_program: Program, port: int, foreground: bool
) -> None:
    options = [
        "--insecure",
        "--port",
        str(port),
        "--dir",
        str(tmp_path),
        *(["--foreground"] if foreground else []),
    ]
    command = [sys.executable, "-m", "edge_fl", "broker", "up", *options]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stderr
        ready = "running" if foreground else "stop with Ctrl-C"
        assert any(ready in line for line in iter(process.stderr.readline, ""))
        client = MqttTransport(Endpoint(port=port), "client", None, lambda event: None, session_expiry_s=0)
        client.wait_connected(60)
        client.close()
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_up_is_closed_and_takes_revocations_while_it_runs(
    tmp_path: Path,
    mosquitto_program: Program,
    port: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    home = tmp_path / "home"
    assert main(["fleet", "enrol", "--baked", "--count", "2", "--identities", str(home)]) == 0
    good, bad = (identity.read(home / f"devices/device-00{number}") for number in (0, 1))
    options = ["--identities", str(home), "--port", str(port), "--dir", str(tmp_path / "broker")]
    with subprocess.Popen(
        [sys.executable, "-m", "edge_fl", "broker", "up", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr
            lines = iter(process.stderr.readline, "")
            assert any("TLS, clients enrolled in" in line for line in lines)
            for found in (good, bad):
                enter(found, port)
            assert main(["fleet", "revoke", bad.name, "--identities", str(home)]) == 0
            assert any("access list reloaded" in line for line in lines)
            assert main(
                ["broker", "check", "--identities", str(home), "--port", str(port), "--format", "json"]
            ) in (0, 1)
            printed = capsys.readouterr().out
            findings = json.loads(printed[printed.index("[\n") :])
            assert not caplog.records, "a refusal that was wanted is no warning"
            assert {f["what"] for f in findings if not f["ok"]} <= {"round trip"}
            enter(good, port)
            enter(bad, port, "may be revoked")
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0


def test_up_enrols_new_devices_once(tmp_path: Path, mosquitto_program: Program, port: int) -> None:
    home, claims = tmp_path / "home", []
    options = ["--enrol", "pi-1", "--identities", str(home), "--port", str(port)]
    command = [sys.executable, "-m", "edge_fl", "broker", "up", *options, "--dir", str(tmp_path / "broker")]
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr
                assert any("TLS, clients enrolled in" in line for line in iter(process.stderr.readline, ""))
            finally:
                process.terminate()
                process.wait(60)
        claims.append((home / "devices/pi-1/token").read_bytes())
    assert claims[0] == claims[1]
    assert main(["broker", "up", "--insecure", "--enrol", "pi-1"]) == 4


def enter(found: Identity, port: int, refusal: str = "") -> None:
    """Connect, or be refused for this reason."""
    client = MqttTransport(
        found.endpoint("127.0.0.1", port), found.name, None, lambda event: None, session_expiry_s=0
    )
    try:
        if refusal:
            refused(client, refusal)
        else:
            client.wait_connected(60)
    finally:
        client.close()
