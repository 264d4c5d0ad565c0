"""The doctor detects each problem of a device and names a remedy."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from edge_fl.cli import main
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.config import DeviceBroker, DeviceConfig, remember
from edge_fl_devices.doctor import CHECKS, DeviceCheck, device_checks, run_checks
from edge_fl_devices.doctor.device_checks import graded
from edge_fl_devices.doctor.network_checks import network
from edge_fl_devices.storage.store import Store
from tests.devices import graphs
from tests.devices.images import X, Y


@pytest.fixture
def config(folder: Path, tmp_path: Path, mosquitto: Mosquitto) -> DeviceConfig:
    """A device without problems."""
    np.savez(tmp_path / "images.npz", x=X, y=Y)
    broker = DeviceBroker(mosquitto.endpoint.host, mosquitto.endpoint.port, "doctor")
    return DeviceConfig("pi-ill", str(tmp_path / "images.npz"), folder=str(folder), broker=broker)


def failed(results: list[DeviceCheck]) -> list[str]:
    assert all(result.remedy for result in results if result.state in ("failed", "warning"))
    return [result.check for result in results if result.state == "failed"]


@pytest.mark.broker
def test_a_device_without_problems_has_no_failed_check(config: DeviceConfig) -> None:
    results = {result.check: result for result in run_checks(config)}
    assert failed([*results.values()]) == []
    assert results["data"].found == "12 pictures: a 6, b 6"
    assert results["topic: own log"].state == results["extractor"].state == "ok"
    assert results["TLS"].state == results["server"].state == "warning"
    assert "logistic" in results["head"].found


@pytest.mark.broker
def test_the_command_lists_the_results_and_exits_with_1_after_a_failure(
    config: DeviceConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--host", config.broker.host, "--port", str(config.broker.port), "--dir", config.folder]
    command = ["device", "doctor", "--id", "pi-ill", *at, "--format", "json", "--data"]
    assert main([*command, config.data]) == 0
    assert {row["check"] for row in json.loads(capsys.readouterr().out)} >= {"python", "disk", "port", "data"}
    assert main([*command, "nowhere.npz"]) == 1
    output = capsys.readouterr()
    assert "data: failed" in output.err and "no such file" in output.out


@pytest.mark.broker
def test_the_command_takes_the_settings_of_the_last_run_and_options_change_them(
    config: DeviceConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    remember(config)
    command = ["device", "doctor", "--dir", config.folder, "--format", "json"]
    assert main(command) == 0
    assert {row["found"] for row in json.loads(capsys.readouterr().out)} >= {"12 pictures: a 6, b 6"}
    assert main([*command, "--port", "1"]) == 1
    assert "port: failed" in capsys.readouterr().err
    (Path(config.folder) / "settings.json").unlink()
    assert main(command) == 4
    assert "id: missing, expected a value" in capsys.readouterr().err


@pytest.mark.broker
def test_broker_checks_are_skipped_while_the_agent_runs(config: DeviceConfig) -> None:
    with Store(Path(config.folder)).owned():
        results = list(network(config))
    assert [result.check for result in results if result.state == "skipped"] == ["sign-in and topics"]


@pytest.mark.parametrize(
    ("host", "port", "check"), [("nowhere.invalid", 1883, "name"), ("127.0.0.1", 1, "port")]
)
def test_checks_stop_at_the_first_connection_failure(host: str, port: int, check: str) -> None:
    results = list(network(DeviceConfig("pi-1", "x", broker=DeviceBroker(host, port))))
    assert failed(results) == [check] and results[-1].check == check


def test_a_missing_identity_is_reported(tmp_path: Path) -> None:
    broker = DeviceBroker("127.0.0.1", identity=str(tmp_path / "nowhere"))
    assert failed(list(network(DeviceConfig("pi-1", "x", broker=broker)))) == ["identity"]


def test_a_clock_before_the_last_seen_date_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tuf").mkdir()
    (tmp_path / "tuf" / "last_seen.txt").write_text("2199-01-01T00:00:00+00:00")
    (found,) = device_checks.clock(DeviceConfig("pi-1", "x", folder=str(tmp_path)))
    assert found.state == "failed" and "2199-01-01" in found.found and "set-ntp" in found.remedy


def test_an_extractor_corrupted_on_the_card_is_detected(folder: Path) -> None:
    config = DeviceConfig("pi-1", "x", folder=str(folder))
    extractor = folder / "release" / "a" / "extractor.onnx"
    weights = graphs.WEIGHTS.tobytes()
    assert weights in extractor.read_bytes()
    extractor.write_bytes(extractor.read_bytes().replace(weights, bytes(len(weights))))
    assert failed(list(device_checks.model(config))) == ["extractor"]
    shutil.rmtree(folder / "release")
    assert [result.state for result in device_checks.model(config)] == ["skipped"]


@pytest.mark.parametrize(("free", "state"), [(10, "failed"), (100, "warning"), (1000, "ok")])
def test_little_room_is_a_warning_and_less_a_failure(free: int, state: str) -> None:
    assert graded("disk", free, 64, 512, f"{free} MB", "free some").state == state


def test_a_check_that_raises_is_a_failed_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(config: DeviceConfig):  # type: ignore[no-untyped-def]
        raise OSError("no such device")
        yield

    monkeypatch.setitem(CHECKS, "machine", raises)
    for name in [name for name in CHECKS if name != "machine"]:
        monkeypatch.delitem(CHECKS, name)
    assert failed(run_checks(DeviceConfig("pi-1", "x"))) == ["machine"]
