"""A fleet whose server is lost or restored from a backup: devices say what to do, keep their heads, and follow the new server."""

import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import Self

import pytest

from edge_fl.cli import main
from edge_fl_devices.doctor import status
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from edge_fl_server.mqtt.session import Server
from edge_fl_server.registry import Database
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.coordinator import CoordinatorOptions, RolloutCoordinator
from tests.devices import graphs
from tests.devices.scripted import eventually, running
from tests.mixed.attacked_broker import Scene, scene

__all__ = ["scene"]  # a fixture
pytestmark = pytest.mark.broker


@dataclass
class Running:
    """A server that stays online, with its roll-outs."""

    scene: Scene
    server: Server
    rollout: RolloutCoordinator

    @classmethod
    def of(cls, scene: Scene) -> Self:
        server = scene.server()
        rollout = RolloutCoordinator(server, scene.repository, CoordinatorOptions(resume=True))
        scene.stack.callback(rollout.close)
        return cls(scene, server, rollout)

    def release(self, scale: float) -> str:
        """Roll the next release out -> the hash of its extractor, which depends on `scale`."""
        payload = graphs.graph(weights=graphs.WEIGHTS * scale)
        manifest = graphs.manifest_for(payload, release=self.scene.repository.next_release())
        self.rollout.roll_out(manifest, {manifest.extractor.sha256: payload})
        return manifest.extractor.sha256

    def leave(self) -> None:
        self.rollout.close()
        self.server.connection.close()


def head(scene: Scene) -> str:
    """The extractor of the newest head of pi-01."""
    heads = Store(scene.home / "pi-01").heads()
    current = Slots(scene.home / "pi-01" / "release").current()
    found = {stored.head.extractor for stored in heads}
    return current.manifest.extractor.sha256 if current and current.manifest.extractor.sha256 in found else ""


def shown(scene: Scene) -> dict[str, object]:
    return {str(row["what"]): row["value"] for row in status.read(scene.home / "pi-01")}


def other_server(scene: Scene, repository: str, registry: str) -> Running:
    """A server with these releases and this registry, on the broker that the old one left."""
    scene.repository = Repository(scene.home / repository)
    scene.db = Database.open(scene.home / registry)
    scene.stack.callback(scene.db.close)
    return Running.of(scene)


def test_after_a_lost_server_a_device_says_what_to_do_and_follows_the_new_one_with_its_head_until_then(
    scene: Scene, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both servers begin with release 1: the device must not take the new one for the one that it has."""
    home, server = scene.home / "pi-01", Running.of(scene)
    first = server.release(1.0)
    device = scene.device()
    with running(device, connect=scene.connect):
        eventually(lambda: device.is_quiet and head(scene) == first)
        server.leave()
        second = other_server(scene, "new", "new.sqlite").release(2.0)
        eventually(lambda: device.state.why == "wrong_key")
        assert head(scene) == first and device.state.release == 1
    remedy = "sudo edge-fl device reset --trust"
    assert remedy in caplog.text and remedy in str(shown(scene)["wrong_key"])
    assert main(["device", "reset", "--trust", "--delete-labels", "--dir", str(home), "--yes"]) == 4
    assert main(["device", "reset", "--trust", "--dir", str(home), "--yes"]) == 0
    assert "trusts the first server that it meets" in capsys.readouterr().err
    assert head(scene) == first, "head and installed release stay"
    device = scene.device()
    assert device.state.release == 1
    with running(device, connect=scene.connect):
        eventually(lambda: device.is_quiet and head(scene) == second)
        assert device.state.status == "ready" and not device.state.why
    assert "wrong_key" not in shown(scene)
    assert scene.rejections() == []


def test_after_the_restore_of_an_older_backup_two_rotations_bring_the_devices_back(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """The restored server numbers its next release as one that the devices have already."""
    server = Running.of(scene)
    server.release(1.0)
    device = scene.device()
    with running(device, connect=scene.connect):
        eventually(lambda: device.is_quiet and device.state.release == 1)
        shutil.copytree(scene.home / "releases", scene.home / "backup")
        with (
            closing(sqlite3.connect(scene.home / "registry.sqlite")) as now,
            closing(sqlite3.connect(scene.home / "backup.sqlite")) as copy,
        ):
            now.backup(copy)
        before = server.release(2.0)
        eventually(lambda: device.is_quiet and head(scene) == before)
        server.leave()
        server = other_server(scene, "backup", "backup.sqlite")
        eventually(lambda: device.state.why == "rollback")
        assert "edge-fl release keys rotate timestamp" in caplog.text and "rollback" in shown(scene)
        assert head(scene) == before
        for role in ("timestamp", "snapshot"):
            scene.repository.rotate(role)
        after = server.release(3.0)
        assert scene.repository.next_release() == 3
        eventually(lambda: device.is_quiet and head(scene) == after)
        assert not device.state.why and "rollback" not in shown(scene)
