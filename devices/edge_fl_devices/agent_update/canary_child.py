"""The canary of an agent: `python -I -m edge_fl_devices.agent_update.canary_child FOLDER` tests the environment of this Python.

Prints one JSON object: the failed checks with what was found (imports, the device's settings, doctor, a connection to the broker) and the
classes that the served model predicts for fixed samples. It runs while the agent does, and changes nothing. Each version brings its own
canary; the format of its answer does not change.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edge_fl.errors import EdgeFLError
from edge_fl.files.paths import text
from edge_fl.release.manifests import canary_input
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_devices.agent_update.canary import CanaryAnswer
from edge_fl_devices.config import DeviceConfig, remembered
from edge_fl_devices.doctor import run_checks
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.serving.served_model import serving
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store

MODULES = ("edge_fl.cli", "edge_fl_devices.cli", "edge_fl_devices.runtime.run_device")
CONNECT_S = 20.0


def test(folder: Path) -> CanaryAnswer:
    """Test everything that an agent needs."""
    for module in MODULES:
        importlib.import_module(module)
    config = remembered(folder)
    if config is None:
        return CanaryAnswer({"settings": f"{text(folder)}: the settings cannot be read"})
    failed = {one.check: one.found for one in run_checks(config) if one.state == "failed"}
    failed |= dict(_connection(config))
    return CanaryAnswer(failed, _classes(folder))


def _connection(config: DeviceConfig) -> Iterator[tuple[str, str]]:
    """Sign in under another client id than the agent's, which keeps its own connection."""
    try:
        endpoint = config.broker.endpoint
        client = MqttTransport(
            endpoint,
            f"{endpoint.client_id(config.broker.fleet, config.id)}-canary",
            None,
            lambda event: None,
            session_expiry_s=0,
            clean_start=True,
        )
        try:
            client.wait_connected(CONNECT_S)
        finally:
            client.close()
    except EdgeFLError as error:
        yield "sign-in", str(error)


def _classes(folder: Path) -> list[str]:
    """The classes predicted for the samples of the installed release's canary; none without a served model."""
    if serving(Store(folder), Slots(folder / "release")) is None:
        return []
    predictor = Predictor(folder)
    z = predictor.extractor.run(canary_input(predictor.manifest.canary, predictor.manifest.input))
    return [found.top[0].label for found in predictor.from_features(z, [""] * len(z))]


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(test(Path(sys.argv[1]))).decode() + "\n")
