"""Settings from the operator over a real mosquitto: applied and reported, forged and replayed ones rejected, a broker that moves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from edge_fl.cli import main
from edge_fl.fleet.remote_settings import DesiredSettings
from edge_fl.wire.messages import decode, encode
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.remote.applied_settings import RemoteSettings
from edge_fl_devices.runtime.device import Device, Services
from edge_fl_server.mqtt import connector
from edge_fl_server.mqtt.devices import remote_settings
from edge_fl_server.registry import registered_devices
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.director import Director
from tests.devices.scripted import eventually, running
from tests.mixed.attacked_broker import TOPICS, Scene

pytestmark = pytest.mark.broker
FIRST = {"watch_s": 60.0, "head": "auto"}


@pytest.fixture
def scene(mosquitto_program: Program, tmp_path: Path) -> Iterator[Scene]:
    with (
        Mosquitto(BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker,
        ExitStack() as stack,
    ):
        yield Scene(tmp_path, broker, stack)


def configured(scene: Scene, name: str = "pi-01") -> tuple[Device, RemoteSettings]:
    own: dict[str, Any] = {"id": name, "data": "folder:/", "folder": str(scene.home / name)}
    settings = RemoteSettings(own, "device.toml")
    return scene.device(name, Services(take_settings=settings.receive)), settings


def states(scene: Scene, name: str = "pi-01") -> dict[str, str]:
    """What the server knows about each desired setting."""
    record = registered_devices.get(scene.db, "main", name)
    desired = registered_devices.desired_settings(scene.db, "main")[name]
    rows = remote_settings.rows(desired, record.capability if record else None)
    return {row.setting: row.state for row in rows if row.state}


def sent(scene: Scene, name: str = "pi-01") -> list[DesiredSettings]:
    topic = TOPICS.down(name, "settings")
    return [decode(packet.payload, DesiredSettings) for packet in scene.sent if packet.topic == topic]


def test_settings_wait_for_a_device_that_is_offline_and_what_it_applied_comes_back(scene: Scene) -> None:
    server, (device, settings) = scene.server(), configured(scene)
    scene.publish(server)
    registered_devices.change_settings(scene.db, "main", ["pi-01"], {**FIRST, "keep": 3})
    eventually(lambda: sent(scene))
    assert set(states(scene).values()) == {remote_settings.WAITING}
    with running(device, connect=scene.connect):  # it trusts no root yet, and fetches one
        eventually(lambda: settings.restart_due)
    settings.begin()
    device = scene.device(services=Services(take_settings=settings.receive))
    device.state = replace_capability(device, settings)
    with running(device, connect=scene.connect):
        eventually(lambda: set(states(scene).values()) == {remote_settings.APPLIED})
        registered_devices.change_settings(scene.db, "main", ["pi-01"], {"keep": None, "head": "none-such"})
        eventually(lambda: settings.restart_due)
    settings.begin()
    assert settings.config.keep == 0 and settings.config.watch_s == 60.0
    assert "none-such" in settings.status.settings["head"].why


def replace_capability(device: Device, settings: RemoteSettings) -> Any:
    """The state of a device that starts with these settings, as `run_device` makes it."""
    from dataclasses import replace as changed

    return changed(device.state, capability=replace(device.state.capability, settings=settings.status))


def forged(scene: Scene) -> DesiredSettings:
    return replace(sent(scene)[-1], serial=2**52, values={"watch_s": 1.0})


def stripped(scene: Scene) -> DesiredSettings:
    return replace(forged(scene), signature=None)


def replayed(scene: Scene) -> DesiredSettings:
    return next(each for each in sent(scene) if each.values == FIRST)


def swapped(scene: Scene) -> DesiredSettings:
    return sent(scene, "pi-02")[-1]


def by_another_key(scene: Scene) -> DesiredSettings:
    return Director(Repository(scene.home / "thief"), "main").sign("settings", "pi-01", stripped(scene))


def as_an_assignment(scene: Scene) -> DesiredSettings:
    return Director(scene.repository, "main").sign("assignment", "pi-01", stripped(scene))


ATTACKS: dict[Callable[[Scene], DesiredSettings], str] = {
    forged: "forged",
    stripped: "unsigned",
    replayed: "replayed",
    swapped: "misdirected",
    by_another_key: "wrong_key",
    as_an_assignment: "forged",
}


def test_settings_that_the_server_did_not_sign_for_this_device_now_are_rejected_by_name(scene: Scene) -> None:
    server, (device, settings) = scene.server(), configured(scene)
    scene.publish(server)
    registered_devices.change_settings(scene.db, "main", ["pi-01", "pi-02"], {**FIRST})
    with running(device, connect=scene.connect):
        eventually(lambda: settings.restart_due)
        registered_devices.change_settings(scene.db, "main", ["pi-01"], {"watch_s": 30.0})
        eventually(lambda: "30.0" in (scene.home / "pi-01" / "remote.json").read_text())
        before = (scene.home / "pi-01" / "remote.json").read_bytes()
        for attack, why in ATTACKS.items():
            packet = Packet(TOPICS.down("pi-01", "settings"), encode(attack(scene)), retain=True)
            scene.attacker.publish(packet)
            eventually(lambda why=why: settings.status.why == why)
            eventually(lambda why=why: why in states(scene)["watch_s"])
            assert (scene.home / "pi-01" / "remote.json").read_bytes() == before, why
        scene.attacker.publish(Packet(TOPICS.down("pi-01", "settings"), b"", retain=True))
        registered_devices.change_settings(
            scene.db, "main", ["pi-01"], {"watch_s": 20.0}
        )  # a genuine one is accepted
        eventually(lambda: settings.status.why == "" and settings.restart_due)


def test_a_new_key_and_a_removed_device(scene: Scene) -> None:
    server, (device, settings) = scene.server(), configured(scene)
    scene.publish(server)
    registered_devices.change_settings(scene.db, "main", ["pi-01"], {**FIRST})
    eventually(lambda: sent(scene))
    scene.repository.rotate("timestamp")
    scene.publish(server)
    server.settings.refresh()
    with running(device, connect=scene.connect):
        eventually(lambda: settings.restart_due)
    registered_devices.remove(scene.db, "main", "pi-01", "decommissioned")
    eventually(lambda: server.journal.blocked("pi-01") == "removed")
    # the message is cleared after the server has noticed
    eventually(lambda: not connector.read_retained(scene.connect, [TOPICS.down("pi-01", "settings")]))


@contextmanager
def agent(folder: Path, port: int) -> Iterator[Path]:
    """Run `edge-fl device run`, with short limits for addresses, on pictures in `folder`; yield the file of its output."""
    for kind, shade in (("cat", 30), ("dog", 200)):
        (folder / "images" / kind).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (shade, number * 20, 0)).save(folder / "images" / kind / f"{number}.png")
    (folder / "device.toml").write_text(
        f'id = "pi-1"\ndata = "folder:{folder}/images"\nfolder = "{folder}/device"\ntier = "head"\n[broker]\nport = {port}\n'
    )
    code = "from edge_fl_devices.remote import applied_settings; applied_settings.TRIAL_S = 2.0; from edge_fl.cli import main; main()"
    arguments = [sys.executable, "-c", code, "device", "run", "--config", str(folder / "device.toml")]
    with (
        (folder / "log").open("w") as output,
        subprocess.Popen(arguments, stdout=output, stderr=output, env={**os.environ}) as child,
    ):
        try:
            yield folder / "log"
        finally:
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0, (folder / "log").read_text()


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """What `edge-fl fleet settings` shows."""
    capsys.readouterr()
    assert (
        main(["fleet", "settings", "pi-1", "--format", "json", "--database", str(folder / "registry.sqlite")])
        == 0
    )
    return {row["setting"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.slow
def test_an_agent_starts_again_with_new_settings_and_leaves_a_broker_that_is_not_there(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    server = scene.server()
    scene.publish(server)

    def fleet_set(*changes: str, code: int | None = 0) -> str:
        """code: None where the answer may come after the command has ended."""
        database = str(scene.home / "registry.sqlite")
        ended = main(["fleet", "set", "pi-1", *changes, "--yes", "--database", database])
        assert code is None or ended == code
        return capsys.readouterr().err

    def waits_for(**expected: tuple[Any, str]) -> None:
        until_s = time.monotonic() + 90
        while True:
            rows = shown(scene.home, capsys)
            found = {key: (rows[key]["actual"], rows[key]["origin"]) for key in expected if key in rows}
            if found == expected:
                return
            assert time.monotonic() < until_s, (rows, log.read_text())
            time.sleep(0.2)

    with agent(scene.home, scene.broker.settings.port) as log:
        eventually(lambda: registered_devices.get(scene.db, "main", "pi-1"))
        assert "keep: applied (pi-1)" in fleet_set("keep=7")
        said = fleet_set("keep=6", "head=nearest", "data=folder:/none", code=1)
        assert "data: folder:/none: not a folder" in said or "data: /none: not a folder" in said
        assert "data: not in effect on every device; there the value before stays" in said
        waits_for(keep=(6, "remote"), head=("nearest", "remote"), data=(None, "file"))
        assert "not a folder" in shown(scene.home, capsys)["data"]["state"]
        fleet_set("broker.port=1", "keep=5", code=None)
        waits_for(**{"broker.port": (scene.broker.settings.port, "fallback"), "keep": (5, "remote")})
        assert "was not reached" in shown(scene.home, capsys)["broker.port"]["state"]
        fleet_set("broker.port=")
        waits_for(**{"broker.port": (scene.broker.settings.port, "file")})
