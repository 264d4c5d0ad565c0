"""Predictions are published with the device's own certificate and name, unless its agent is connected with it."""

import queue
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from time import sleep

import pytest

from edge_fl.errors import ConfigError, InputError
from edge_fl.wire import identity
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import home_assistant
from edge_fl.wire.transport import Event, Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices.storage.store import Store
from edge_fl_maker.capture.streams import Stream
from edge_fl_maker.home_assistant import connected
from edge_fl_maker.watch import WatchedPrediction

pytestmark = pytest.mark.broker
PREDICTION = WatchedPrediction(
    "0", 0, "cat", 0.9, "answered", 0.1, (), ("cat",), 0.9, "2026-01-01T00:00:00.000+00:00", 1, 0
)


@pytest.fixture(scope="module")
def broker(
    mosquitto_program: Program, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Path]]:
    """A broker with certificates; yields its port and the folder of the identities."""
    folder = tmp_path_factory.mktemp("publishing")
    authority = Authority.make(folder / "home")
    authority.bake({name: folder / name for name in ("pi-1", "pi-1-camera")})
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = BrokerSettings(folder / "broker", port=0, certificates=certificates)
    with Mosquitto(register_sync.with_register(settings, authority), mosquitto_program) as running:
        yield running.settings.port, folder


def settings(folder: Path, port: int, identity: Path) -> Path:
    file = folder / "device.toml"
    broker = f'[broker]\nhost = "127.0.0.1"\nport = {port}\nidentity = "{identity}"\n'
    file.write_text(f'data = "{folder}"\nfolder = "{folder / "state"}"\n{broker}')
    return file


def heard(port: int, office: Path, topic: str) -> tuple[MqttTransport, queue.SimpleQueue[Event]]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    endpoint = identity.read(office).endpoint("127.0.0.1", port)
    listener = MqttTransport(endpoint, "operator", None, lambda event: events.put(event))
    listener.subscribe(topic)
    listener.drain(60)
    return listener, events


def test_the_operator_reads_what_a_device_publishes_under_its_own_name(
    broker: tuple[int, Path], tmp_path: Path
) -> None:
    port, folder = broker
    listener, events = heard(port, folder / "home" / "operator", "homeassistant/+/pi-1/#")
    config = settings(tmp_path, port, folder / "pi-1")
    with closing(connected(config, None, {}, tmp_path)) as publisher:
        publisher.publish(PREDICTION)
    found = {}
    offline = home_assistant("pi-1", "availability"), b"offline"
    while offline not in found.items():
        if isinstance(event := events.get(timeout=60), Packet):
            found[event.topic] = event.payload
    assert b'"label":"cat"' in found["homeassistant/sensor/pi-1/prediction"]
    updates = [home_assistant("pi-1", f"{what}/state", "update") for what in ("release", "agent")]
    assert len(found) == 8 and set(updates) < found.keys()
    listener.close()


def test_with_a_running_agent_another_certificate_is_used(broker: tuple[int, Path], tmp_path: Path) -> None:
    port, folder = broker
    config = settings(tmp_path, port, folder / "pi-1")
    with Store(tmp_path / "state").owned():
        with pytest.raises(InputError, match=r"the agent in .* uses this certificate"):
            connected(config, None, {}, tmp_path)
        second = {"identity": str(folder / "pi-1-camera")}
        with closing(connected(config, None, second, tmp_path)) as publisher:
            publisher.publish(PREDICTION)


def test_a_stream_is_read_with_an_identity(broker: tuple[int, Path], tmp_path: Path) -> None:
    port, folder = broker
    source = f"mqtts://127.0.0.1:{port}/homeassistant/sensor/pi-1/prediction?identity={folder / 'home' / 'operator'}"
    config = settings(tmp_path, port, folder / "pi-1")
    with closing(Stream(source)) as stream, closing(connected(config, None, {}, tmp_path)) as publisher:
        for label in cycle("ab"):  # a change is published at once
            publisher.publish(replace(PREDICTION, state=label))
            if not stream.waiting.empty():
                break
            sleep(0.05)
        values, *_ = next(stream.blocks())
    assert values["probability"].tolist() == [0.9] and values["frame"].tolist() == [1]
    with closing(Stream(source.replace("operator", "nobody"))) as stream, pytest.raises(ConfigError):
        next(stream.blocks())


def test_without_settings_a_name_is_needed() -> None:
    with pytest.raises(ConfigError, match="--id"):
        connected(None, None, {}, Path())
