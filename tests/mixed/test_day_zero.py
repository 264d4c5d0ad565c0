"""Head-only devices from day zero over mosquitto: without labels they serve the fleet's head, with ten they are above their own heads.

The server trains on other images than those of the devices, so no device is tested on an image that the fleet's head has seen.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paho.mqtt.client import Client, MQTTMessage, MQTTProtocolVersion
from paho.mqtt.enums import CallbackAPIVersion
from sklearn.datasets import load_digits

from edge_fl.wire.messages import Report, decode
from edge_fl.wire.topics import Topics
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_lab.recommend import difference

DEVICES = 24
MOST_S = 5.0
DATA = ["data.partition=dirichlet-clients", "data.beta=1.0"]
SERVERS = 700  # of 1,797 images
RUN = (
    """source=simulated method.name=fedavg data.dataset=servers data.clients=4 rounds=6 evaluate_every=0""".split()
    + DATA
)

pytestmark = pytest.mark.broker


class Watch:
    """The reports of a fleet's devices, and the time from the first signed release to each."""

    def __init__(self, port: int, fleet: str) -> None:
        self.reports: dict[str, Report] = {}
        self.delays_s: dict[str, float] = {}
        self._published_s: float | None = None
        self._topics = Topics(fleet)
        self._client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
        self._client.on_message = self._take
        self._client.connect("127.0.0.1", port)
        self._client.subscribe(f"{self._topics.root}/#", 1)
        self._client.loop_start()

    def _take(self, client: Client, data: Any, message: MQTTMessage) -> None:
        address = self._topics.parse(message.topic)
        if address.kind == "art" and self._published_s is None:
            self._published_s = time.monotonic()
        elif address.kind == "rpt":
            report, device = decode(message.payload, Report), address.device
            if self._published_s and device not in self.delays_s:
                self.delays_s[device] = time.monotonic() - self._published_s
            self.reports[device] = report

    def close(self) -> None:
        self._client.loop_stop()
        self._client.disconnect()


def divide_digits(folder: Path) -> None:
    """Write two data sets without a common image: the server's and the devices'."""
    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(labels))
    folder.mkdir(exist_ok=True)
    for name, rows in ("servers", order[:SERVERS]), ("devices", order[SERVERS:]):
        np.savez(folder / f"{name}.npz", x=pixels[rows], y=labels[rows])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "edge_fl", *arguments]


@contextmanager
def fleet(folder: Path, port: int, name: str, labels: int) -> Iterator[None]:
    """A fleet of head-only devices with so many labels each; ends with the server."""
    given = ["--head-only", str(DEVICES), "--heads", "logistic", "--own-labels", str(labels), "--until-idle"]
    given += ["--dataset", "devices"]
    given += [
        "--port",
        str(port),
        "--fleet",
        name,
        "--dir",
        name,
        "--format",
        "json",
        "--set",
        "data.beta=0.5",
    ]
    with (folder / f"{name}.json").open("w") as out:
        given += [each for setting in DATA for each in ("--set", setting)]
        process = subprocess.Popen(command("fleet", "up", *given), cwd=folder, stdout=out)
        try:
            yield
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def run(folder: Path, mosquitto: Mosquitto, name: str, labels: int, *settings: str) -> Watch:
    """A run whose releases such a fleet serves -> what its devices reported."""
    divide_digits(folder / ".data")
    watch = Watch(mosquitto.endpoint.port, name)
    options = [each for setting in (*RUN, *settings) for each in ("--set", setting)]
    served = [
        "--port",
        str(mosquitto.endpoint.port),
        "--fleet",
        name,
        "--set",
        f"release.heads={DEVICES}",
        *options,
    ]
    with fleet(folder, mosquitto.endpoint.port, name, labels):
        subprocess.run(command("server", "run", "demo", *served), cwd=folder, check=True, timeout=120)
    watch.close()
    return watch


@pytest.mark.timed
def test_without_labels_every_device_serves_the_fleets_head_within_seconds(
    tmp_path: Path, mosquitto: Mosquitto
) -> None:
    watch = run(tmp_path, mosquitto, "zero", 0)
    devices = json.loads((tmp_path / "zero.json").read_text())
    assert len(devices) == len(watch.reports) == DEVICES
    for device in devices:
        assert (device["head"], device["samples"], device["why"]) == ("fleet", 0, "")
    assert max(watch.delays_s.values()) < MOST_S
    accuracies = [report.metrics["personal.test_acc.after"] for report in watch.reports.values()]
    assert np.mean(accuracies) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_ten_labels_each_the_mean_is_far_above_the_own_heads(
    tmp_path: Path, mosquitto: Mosquitto
) -> None:
    served = run(tmp_path, mosquitto, "served", 10)
    own = run(tmp_path, mosquitto, "own", 10, "release.serves=way")
    names = sorted(served.reports)
    after = [
        np.array([100 * found.reports[name].metrics["personal.test_acc.after"] for name in names])
        for found in (served, own)
    ]
    gain = difference(*after)
    assert gain is not None and gain.n == DEVICES
    assert gain.mean >= 15 and gain.low > 0
    assert {report.head for report in served.reports.values()} == {"fleet"}
    assert {report.head for report in own.reports.values()} <= {"logistic", "constant"}
    for report in served.reports.values():
        assert "fleet.test_acc" in report.metrics
