"""A device folder with a fitted head, and a scripted server on a real broker."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from edge_fl import heads
from edge_fl.blob import split
from edge_fl.modalities import scaled
from edge_fl.wire.messages import Report
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.agent.outbox import Parcel
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store, StoredHead
from tests.devices import graphs
from tests.devices.images import X, Y
from tests.devices.scripted import ScriptedServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A device's folder after a fit."""
    payload = graphs.graph()
    manifest, slots = graphs.manifest_for(payload), Slots(tmp_path / "pi" / "release")
    slots.prepare(manifest)
    for index, chunk in enumerate(split(payload, manifest.extractor.chunk_bytes)):
        slots.sink(manifest.extractor).add(index, bytes(chunk))
    slots.install(manifest)
    z = scaled(X).reshape(12, -1) @ graphs.WEIGHTS
    head = heads.fit("logistic", z, Y, 2, unit_norm=False, extractor=manifest.extractor.sha256)
    parcel = Parcel("toy", 1, Report("rel-1", "head", "boot", 12, {"personal.test_acc.after": 1.0}), 60)
    Store(tmp_path / "pi").keep_head(StoredHead(head, 1, parcel))
    return tmp_path / "pi"


@pytest.fixture
def server(mosquitto: Mosquitto) -> Iterator[ScriptedServer]:
    """Online until the test ends."""
    server = ScriptedServer(partial(MqttTransport, mosquitto.endpoint, session_expiry_s=0))
    server.online()
    yield server
    server.leave()
