"""A device killed at any step of installing, fitting or reporting serves the old model or the new one, and every report counts once."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.serving.served_model import serving
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from tests.devices import graphs
from tests.devices.scripted import TOPICS, ScriptedServer
from tests.devices.site import Site, big, expected, samples
from tests.sample import sample

DATA = samples(60, 0)
WAIT_S = 240.0

STEPS = [
    "change release/chunks/*:2",  # fetching: one chunk is there
    "change release/chunks/*:20",  # half of them are
    "remove release/?/manifest.json",  # installing: the slot is about to be emptied
    "rename release/?/extractor.onnx",
    "rename release/?/manifest.json",
    "rename release/state.json:1",  # the new release is about to become current
    "remove release/chunks/[0-9a-f]*",  # it is current, leftovers are there
    "create heads/*",  # fitting: the head is known, nothing of it is on the disk
    "rename heads/*",  # the new model is about to serve
    "rename release/state.json:2",  # it serves, but is not marked as good
    "rename outbox/*",  # reporting: it serves and is good, the report is not in the outbox
    "rename memory.json:2",  # acknowledged, which is not yet remembered
    "remove outbox/rel-2.json",  # remembered, but still in the outbox
]
IN_CI = [  # one of each phase
    "change release/chunks/*:20",
    "rename release/state.json:1",
    "create heads/*",
    "rename outbox/*",
]


@dataclass
class Home:
    """A device folder that serves release 1, to be copied; release 2, another extractor, is published."""

    folder: Path
    server: ScriptedServer
    endpoint: Endpoint
    data: Path

    def command(self, name: str, folder: Path) -> list[str]:
        broker = ["--host", self.endpoint.host, "--port", str(self.endpoint.port), "--fleet", TOPICS.fleet]
        what = [
            "--id",
            name,
            "--data",
            str(self.data),
            "--dir",
            str(folder),
            "--tier",
            "head",
            "--head",
            "nearest",
        ]
        return ["device", "run", *what, *broker]

    @contextmanager
    def running(self, name: str, folder: Path, step: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [
            sys.executable,
            "-m",
            "tests.devices.kill_at_step",
            str(folder),
            step,
            *self.command(name, folder),
        ]
        with (folder.parent / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(120)

    def serve_acknowledging(self, process: subprocess.Popen[bytes], name: str, id: str) -> None:
        """Acknowledge the report `id` whenever it arrives, until the process is killed at its step."""
        until_s, acknowledged = time.monotonic() + WAIT_S, 0
        while process.poll() is None:
            assert time.monotonic() < until_s, "the step never came"
            reports = [report for report in self.server.messages(name, "rpt") if report.id == id]
            if len(reports) > acknowledged:
                acknowledged = len(reports)
                self.server.ack(name, id)
            time.sleep(0.02)
        assert process.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def home(mosquitto: Mosquitto, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    root = tmp_path_factory.mktemp("power")
    (root / "device").mkdir()
    np.savez(root / "images.npz", x=DATA.x, y=DATA.y)
    connect = partial(MqttTransport, mosquitto.endpoint, session_expiry_s=0)
    server = ScriptedServer(connect, "power-cut-server")
    server.online()
    site = Site(connect, server, root)
    home = Home(root / "device", server, mosquitto.endpoint, root / "images.npz")
    site.serve(site.publish(big()), "pi-first")
    with home.running("pi-first", home.folder, "-"):
        server.wait_for("pi-first", "rpt")
        server.ack("pi-first", "rel-1")
        server.wait_for("pi-first", "state", lambda s: s.release == 1 and s.activity == "idle")
    site.publish(big(-graphs.WEIGHTS), expected=-expected())
    yield home
    server.leave()


def release_served(folder: Path) -> int:
    """The release of the served model, which must be whole and accurate."""
    found = Predictor(folder).predict(DATA.x)
    right = [name == "ab"[y] for (name, _), y in zip(found, DATA.y, strict=True)]
    # an old head on the new features, whose signs are flipped, is almost always wrong
    assert np.mean(right) > 0.7
    served = serving(Store(folder), Slots(folder / "release"))
    assert served and served.stored.head.extractor == served.installed.manifest.extractor.sha256
    assert served.stored.release == served.installed.manifest.release
    return served.stored.release


def check_killed_at(home: Home, step: str, name: str, folder: Path) -> None:
    server = home.server
    shutil.copytree(home.folder, folder)
    server.assignment(name, "serve", run_id="toy", round=1, id="rel-2", release=2)
    with home.running(name, folder, step) as process:
        home.serve_acknowledging(process, name, "rel-2")
    assert release_served(folder) in (1, 2)
    reported = len(server.messages(name, "rpt"))
    with home.running(name, folder, "-"):
        if "rel-2" not in Store(folder).memory().done:
            server.wait_for(name, "rpt", number=reported + 1)
            server.ack(name, "rel-2")
        boot = server.wait_for(name, "state", lambda s: s.release == 2 and s.activity == "idle").boot
        assert boot
        reported = len(server.messages(name, "rpt"))
        time.sleep(0.5)
    assert release_served(folder) == 2
    reports = server.messages(name, "rpt")
    assert len(reports) == reported, "a report that was acknowledged came again"
    assert {(report.id, report.release, report.error) for report in reports} == {("rel-2", 2, "")}
    assert len({msg.metrics["personal.test_acc.after"] for msg in reports}) == 1
    assert Store(folder).outbox() == [] and "rel-2" in Store(folder).memory().done


@pytest.mark.timeout(900)
@pytest.mark.broker
def test_killed_while_switching_models_a_device_has_one_whole_model_and_one_report(
    home: Home, tmp_path: Path
) -> None:
    check_killed_at(home, "rename heads/*", "pi-quick", tmp_path / "pi")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.broker
@pytest.mark.parametrize("step", sample(STEPS, IN_CI))
def test_killed_at_any_step_a_device_has_one_whole_model_and_one_report(
    home: Home, tmp_path: Path, step: str
) -> None:
    check_killed_at(home, step, f"pi-cut-{STEPS.index(step)}", tmp_path / "pi")
