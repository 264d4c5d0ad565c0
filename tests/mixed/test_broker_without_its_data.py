"""A broker that lost all retained messages and sessions: server and devices bring back everything, whoever was connected."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.runtime.device import Device
from edge_fl_server.mqtt.connector import LeaseLimits, read_retained
from edge_fl_server.mqtt.session import Server
from edge_fl_server.registry import registered_devices
from edge_fl_server.release.rollout.coordinator import CoordinatorOptions, RolloutCoordinator
from tests.devices import graphs
from tests.devices.scripted import eventually, running
from tests.mixed.attacked_broker import TOPICS, Scene
from tests.mixed.test_remote_settings import configured

pytestmark = pytest.mark.broker
QUICK = LeaseLimits(settle_s=1.0)


@pytest.fixture
def scene(mosquitto_program: Program, tmp_path: Path) -> Iterator[Scene]:
    with (
        Mosquitto(
            BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program, lambda line: None
        ) as broker,
        ExitStack() as stack,
    ):
        yield Scene(tmp_path, broker, stack)


def coordinator(scene: Scene, server: Server) -> RolloutCoordinator:
    return scene.stack.enter_context(
        closing(RolloutCoordinator(server, scene.repository, CoordinatorOptions(resume=True)))
    )


def lose_everything(broker: Mosquitto) -> None:
    """A power cut that damages the database."""
    broker.kill()
    (broker.settings.folder / "mosquitto.db").write_bytes(b"damaged")
    broker.restart()


def retained(scene: Scene) -> set[str]:
    """Topics with a retained message, without metadata that a newer version has replaced."""
    found = read_retained(scene.connect, [f"{TOPICS.root}/#"], QUICK)
    current = {TOPICS.tuf(name) for name, _ in scene.repository.files()}
    return {
        topic
        for topic, payload in found.items()
        if payload and not topic.endswith("/echo") and ("/tuf/" not in topic or topic in current)
    }


def prepared(scene: Scene) -> tuple[Server, RolloutCoordinator, Device]:
    """A server with a release and settings for the device."""
    server = scene.server()
    rollout = coordinator(scene, server)
    payload = graphs.graph()
    manifest = graphs.manifest_for(payload)
    registered_devices.change_settings(scene.db, "main", ["pi-01"], {"watch_s": 60.0})
    device, _ = configured(scene)
    with running(device, connect=scene.connect):
        eventually(lambda: server.roster.get("pi-01"))
        rollout.roll_out(manifest, {manifest.extractor.sha256: payload})
        eventually(lambda: device.is_quiet and device.state.release == 1)
    return server, rollout, device


def test_server_and_device_stay_connected(scene: Scene) -> None:
    server, _, _ = prepared(scene)
    device, _ = configured(scene)
    with running(device, connect=scene.connect):
        eventually(lambda: device.is_quiet and (d := server.roster.get("pi-01")) and d.ready)
        before = retained(scene)
        assert TOPICS.down("pi-01", "settings") in before and TOPICS.down("pi-01", "assignment") in before
        lose_everything(scene.broker)
        eventually(lambda: retained(scene) == before)


def test_the_device_comes_back_after_the_loss(scene: Scene) -> None:
    server, _, _ = prepared(scene)
    eventually(lambda: not ((d := server.roster.get("pi-01")) and d.ready))
    before = retained(scene)
    lose_everything(scene.broker)
    device, _ = configured(scene)
    eventually(lambda: retained(scene) >= before - {TOPICS.up("pi-01", "state"), TOPICS.up("pi-01", "meta")})
    with running(device, connect=scene.connect):
        eventually(lambda: device.is_quiet and device.state.release == 1)
        eventually(lambda: retained(scene) == before)


def test_server_and_device_start_again_after_the_loss(scene: Scene) -> None:
    server, rollout, _ = prepared(scene)
    before = retained(scene)
    rollout.close()
    server.connection.close()
    lose_everything(scene.broker)
    assert not retained(scene)
    server = scene.server()
    coordinator(scene, server)
    device, _ = configured(scene)
    with running(device, connect=scene.connect):
        eventually(lambda: device.is_quiet and device.state.release == 1)
        eventually(lambda: retained(scene) == before)
