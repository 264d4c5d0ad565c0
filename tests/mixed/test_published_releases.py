"""Extractors that no run trained: a command or the server that is online rolls them out; later releases append classes."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_fl.cli import main
from edge_fl.console.units import size
from edge_fl.data.samples import ClientData, Samples
from edge_fl.release.manifests import Manifest
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store, StoredHead
from edge_fl_server.children import CommandProcesses
from edge_fl_server.registry import Database, registered_reports, rollouts
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.mixed.conftest import Site, data_of
from tests.server.conftest import Stage

pytestmark = pytest.mark.broker


def two_classes(name: str) -> ClientData:
    """Data of a device without any picture of the third class."""
    data = data_of(name)

    def kept(samples: Samples) -> Samples:
        return samples.take(np.flatnonzero(samples.y < 2))

    return ClientData(*(kept(part) for part in (data.train, data.validation, data.test)))


class Operator:
    """Runs commands against the site's broker in its folder."""

    def __init__(self, site: Site, port: int) -> None:
        self.site, self.home = site, site.folder / "releases"
        self.options = ["--port", str(port), "--home", str(self.home)]
        self.model = site.folder / "model.onnx"
        self.model.write_bytes(graphs.graph())

    def publish(self, classes: str, *more: str) -> int:
        return main(["release", "publish", str(self.model), "--classes", classes, *more, *self.options])

    @property
    def database(self) -> Database:
        return Database.open(self.site.folder / "server" / "registry.sqlite")

    @property
    def releases(self) -> list[Manifest]:
        return Repository(self.home / "main").releases()

    def head(self, device: str) -> StoredHead:
        """The head with which a device serves."""
        folder = self.site.folder / device
        installed = Slots(folder / "release").current()
        assert installed
        stored = Store(folder).head(installed.manifest.extractor.sha256)
        assert stored
        return stored


@pytest.fixture
def operator(mosquitto_program: Program, tmp_path: Path) -> Iterator[Operator]:
    with Mosquitto(BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker:
        yield Operator(Site(partial(MqttTransport, broker.endpoint), tmp_path), broker.endpoint.port)


def accuracies(operator: Operator, release: int) -> dict[str, float | None]:
    """The accuracy that each device reported on a release."""
    with closing(operator.database) as db:
        return {report.device: report.after for report in registered_reports.of_release(db, "main", release)}


def test_a_published_file_is_served_and_classes_grow_without_losing_heads(
    operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    site = operator.site
    site.data = two_classes
    with site.fleet((), {"h1": "logistic", "h2": "logistic"}):
        assert operator.publish("cat,dog") == 0
        before = {device: operator.head(device) for device in ("h1", "h2")}
        first = accuracies(operator, 1)
    printed = capsys.readouterr()
    assert printed.out == "completed\n"
    (published,) = operator.releases
    assert published.bytes == published.extractor.bytes + sum(one.bytes for one in published.extras.values())
    assert f"release 1: {size(published.bytes)}, " in printed.err
    assert main(["release", "list", "--format", "json", *operator.options[2:]]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    with closing(operator.database) as db:
        (recorded,) = rollouts.releases_of(db, "main")  # what the dashboard shows
    assert listed["bytes"] == recorded.bytes == published.bytes
    assert first.keys() == {"h1", "h2"} and all(value is not None for value in first.values())
    assert [head.head.classes for head in before.values()] == [2, 2]

    site.data = lambda name: data_of(name) if name == "h2" else two_classes(name)
    with site.fleet((), {"h1": "logistic", "h2": "logistic"}):
        assert operator.publish("cat,dog,horse") == 0
    (manifest, grown) = operator.releases
    assert manifest.extractor == grown.extractor
    assert (manifest.method, manifest.run_id, grown.classes) == (
        "pretrained",
        "none",
        ["cat", "dog", "horse"],
    )
    second = accuracies(operator, 2)
    after = {device: operator.head(device) for device in ("h1", "h2")}
    # h1 has no picture of the third class: its head is not even fitted again
    assert (after["h1"].release, after["h1"].head.classes) == (2, 2)
    assert after["h1"].fit_key == before["h1"].fit_key
    assert second["h1"] == first["h1"]
    # h2 learnt it, and its class ids kept their meaning
    data = data_of("h2").train
    z = (data.x.reshape(len(data), -1).astype(np.float32) / 255) @ graphs.WEIGHTS
    assert after["h2"].head.classes == 3
    assert {0, 1, 2} == set(after["h2"].head.predict(z))

    names = [name for name, _ in Predictor(site.folder / "h2").predict(data.x)]
    assert names == [grown.classes[label] for label in after["h2"].head.predict(z)]
    assert {name for name, _ in Predictor(site.folder / "h1").predict(data.x)} <= {"cat", "dog"}

    capsys.readouterr()
    for classes in ("dog,cat,horse,cow", "cat,dog"):
        assert operator.publish(classes) == 4
        said = capsys.readouterr().err
        assert "release 2 has cat, dog, horse" in said and "nothing was published" in said
    assert len(operator.releases) == 2
    assert main(["release", "list", "--home", str(operator.home), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["release"], row["method"], row["state"]) for row in rows] == [
        (2, "pretrained", "completed"),
        (1, "pretrained", "completed"),
    ]

    # back to two classes: a head for three is not used with two names
    site.data = two_classes
    with site.fleet((), {"h2": "logistic"}):
        assert main(["release", "rollback", *operator.options]) == 0
        assert {name for name, _ in Predictor(site.folder / "h2").predict(data.x)} <= {"cat", "dog"}
    assert operator.head("h2").head.classes == 2


@pytest.mark.slow
def test_the_server_that_is_online_rolls_it_out(
    operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    with CommandProcesses(lambda name, line: lines.append(line), {"OMP_NUM_THREADS": "1"}) as children:
        children.start("up", "server", "up", *operator.options)
        stage = Stage(connect=operator.site.connect)
        assert stage.eventually(lambda: any("online, no release yet" in line for line in lines), 60), lines
        with operator.site.fleet((), {"h1": "logistic"}):
            for number, classes in enumerate(("cat,dog,horse", "cat,dog,horse,cow"), 1):
                assert operator.publish(classes) == 0
                assert "the running server carries it out" in capsys.readouterr().err
                assert accuracies(operator, number).keys() == {"h1"}
            # the same again is no new release
            assert operator.publish("cat,dog,horse,cow") == 0
            said = capsys.readouterr()
            assert "release 2: rolled out before" in said.err and said.out == "completed\n"
            # another extractor, whose chunks the server has not sent
            operator.model.write_bytes(graphs.graph(weights=graphs.WEIGHTS + 1))
            assert operator.publish("cat,dog,horse,cow") == 0
            assert accuracies(operator, 3).keys() == {"h1"}
        stage.close()
    assert [manifest.release for manifest in operator.releases] == [1, 2, 3]


KILL = """
import importlib, os, signal
from edge_fl.cli import main

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

module = importlib.import_module("edge_fl_server.release.{module}")
module.{target} = killed
main({arguments!r})
"""
KILLS = {
    "before it is signed": ("repository", "Repository.publish"),
    "while it is signed": ("repository", "atomic.write"),
    "before the request": ("rollout.commands", "request"),
    "after the request": ("rollout.commands", "RolloutCoordinator"),
}


@pytest.mark.slow
def test_a_killed_command_leaves_the_old_release_and_repeating_it_completes(operator: Operator) -> None:
    classes = "cat,dog,horse"
    with operator.site.fleet((), {"h1": "logistic"}):
        assert operator.publish(classes) == 0
        for number, (module, target) in enumerate(KILLS.values(), 1):
            classes += f",another-{number}"
            arguments = ["release", "publish", str(operator.model), "--classes", classes, *operator.options]
            code = KILL.format(module=module, target=target, arguments=arguments)
            killed = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
            assert killed.returncode == -signal.SIGKILL, killed.stderr[-500:]
            assert operator.head("h1").release == number
            with closing(operator.database) as db:
                assert rollouts.served_release(db, "main") == number
            assert operator.publish(classes) == 0
            assert operator.head("h1").release == number + 1
            assert operator.releases[-1].release == number + 1


@pytest.mark.slow
def test_without_a_broker_nothing_is_signed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model := tmp_path / "model.onnx").write_bytes(graphs.graph())
    with socket.socket() as nobody:  # bound, but does not listen
        nobody.bind(("127.0.0.1", 0))
        options = ["--home", str(tmp_path / "releases"), "--port", str(nobody.getsockname()[1])]
        assert main(["release", "publish", str(model), "--classes", "cat,dog", *options]) == 2
    assert "nothing was requested" in capsys.readouterr().err
    assert not (tmp_path / "releases").exists()


def test_a_network_that_edge_fl_builds_is_published_by_name(
    operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["release", "publish", "--model", "cnn-tiny", "--size", "16", "--classes", "cat,dog"]
    assert main([*arguments, *operator.options]) == 0
    (manifest,) = operator.releases
    assert (manifest.method, manifest.input.shape) == ("pretrained", (3, 16, 16))
    assert main([*arguments, "--mean", "0.5", *operator.options]) == 4
    assert "describe a file" in capsys.readouterr().err
