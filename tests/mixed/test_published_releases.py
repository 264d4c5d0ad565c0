"""Extractors that no run trained: published by a command, rolled out by whoever serves the fleet; later releases append classes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.cli import main
from edge_fl.data.samples import ClientData, Samples
from edge_fl.release.manifest import Manifest
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.config import Settings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store, StoredHead
from edge_fl_server.children import Children
from edge_fl_server.registry import Database, reports, rollouts
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
    with Mosquitto(Settings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker:
        yield Operator(Site(partial(MqttTransport, broker.endpoint), tmp_path), broker.endpoint.port)


def accuracies(operator: Operator, release: int) -> dict[str, float | None]:
    """The accuracy that each device reported on a release."""
    with closing(operator.database) as db:
        return {report.device: report.after for report in reports.of_release(db, "main", release)}


def test_a_published_file_is_served_and_classes_grow_without_losing_heads(
    operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    site = operator.site
    site.data = two_classes
    with site.fleet((), {"h1": "logistic", "h2": "logistic"}):
        assert operator.publish("cat,dog") == 0
        before = {device: operator.head(device) for device in ("h1", "h2")}
        first = accuracies(operator, 1)
    assert capsys.readouterr().out == "completed\n"
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
    # h1 has no picture of the third class: the head stays as it was, for the new release
    assert after["h1"].release == 2
    assert all(np.array_equal(a, b) for a, b in zip(
        before["h1"].head.to_arrays().values(), after["h1"].head.to_arrays().values(), strict=True
    ))  # fmt: skip
    assert second["h1"] == first["h1"]
    # h2 learnt it, and its class ids kept their meaning
    data = data_of("h2").train
    z = (data.x.reshape(len(data), -1).astype(np.float32) / 255) @ graphs.WEIGHTS
    assert after["h2"].head.classes == 3
    assert {0, 1, 2} == set(after["h2"].head.predict(z))

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
