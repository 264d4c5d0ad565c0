"""From an image to a prediction on aarch64: flashed, installed offline as the first boot does, and run against a real broker."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broker.config import Certificates, Settings
from broker.find import Program
from broker.mosquitto import Mosquitto
from edge_fl import metrics
from edge_fl.cli import main
from edge_fl.release.repository import Repository
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt import MqttTransport
from tests.arm64 import userland
from tests.arm64.pi import Pi, require
from tests.conftest import Issue
from tests.devices import graphs
from tests.devices.flash import cards
from tests.devices.scripted import TOPICS, ScriptedServer

pytestmark = [
    pytest.mark.arm64,
    pytest.mark.broker,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shutil.which("mformat"), reason="no mtools here"),
]
UNIT = "etc/systemd/system/edge-fl.service"
STEP_S = 240


@pytest.fixture
def broker(mosquitto_program: Program, issue: Issue, tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker with TLS, on which pi-07 is pi-07."""
    certificates = Certificates(*issue("broker"))
    settings = Settings(tmp_path / "mosquitto", port=0, fleet=TOPICS.fleet, certificates=certificates)
    with Mosquitto(settings, mosquitto_program) as broker:
        yield broker


def identity(issue: Issue, folder: Path) -> Path:
    folder.mkdir()
    for name, file in zip(("ca.crt", "client.crt", "client.key"), issue("pi-07"), strict=True):
        shutil.copyfile(file, folder / name)
    return folder


def images(folder: Path) -> None:
    """Two classes of pictures that differ in brightness."""
    rng = np.random.default_rng(0)
    for name, bright in (("a", 0), ("b", 150)):
        (folder / name).mkdir(parents=True)
        for number in range(16):
            pixels = (rng.integers(0, 100, (4, 4)) + bright).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def folder_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def test_a_flashed_card_installs_itself_learns_and_predicts(
    broker: Mosquitto, issue: Issue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require()
    began_s = time.monotonic()
    base = userland.build(userland.BASE)
    card = cards.image(tmp_path / "sd.img", cards.issued_for(userland.python(base)), mebibytes=192)
    flash = ["flash", "--device", "pi-07", "--boot", str(card), "--offline", "--fleet", TOPICS.fleet]
    flash += [
        "--host",
        "127.0.0.1",
        "--port",
        str(broker.endpoint.port),
        "--identity",
        str(identity(issue, tmp_path / "id")),
    ]
    assert main(flash) == 0
    assert main(flash) == 0 and "on it already" in capsys.readouterr().err
    flashed_s = time.monotonic()

    pi = Pi(card, userland.copy(base, tmp_path / "pi"))
    wheelhouse = folder_bytes(pi.boot / "edge-fl/wheels")
    script = (pi.boot / "cmdline.txt").read_text().partition("systemd.run=")[2].split()[0]
    pi.run("/bin/sh", script)
    assert (pi.boot / "edge-fl/install.log").read_text().endswith("edge-fl: install rc=0\n")
    assert (pi.boot / "cmdline.txt").read_text() == f"{cards.CMDLINE}\n" and not (
        pi.boot / "firstrun.sh"
    ).exists()
    assert not (pi.boot / "edge-fl/identity").exists()
    assert pi.run("stat", "-c", "%a %U", "/etc/edge-fl/identity/client.key") == "600 edge-fl\n"
    installed_s = time.monotonic()
    pi.run("/bin/sh", "/boot/firmware/edge-fl/install.sh")  # again: nothing is left to do
    again_s = time.monotonic()

    images(pi.root / "srv/images")
    server = ScriptedServer(partial(MqttTransport, server_endpoint(broker, issue)))
    server.online()
    payload = graphs.graph()
    manifest = graphs.manifest_for(payload)
    server.release(Repository(tmp_path / "server"), manifest, payload)
    server.want("pi-07", "serve", task="toy", round=1, id="rel-1", release=1)
    with Listener() as systemd, pi.running(*as_systemd_does(pi, systemd.address), log=tmp_path / "agent.log"):
        try:
            meta = server.wait_for("pi-07", "meta", deadline_s=STEP_S)
            assert (meta.machine, meta.samples) == ("aarch64", 24)
            born_s = time.monotonic()
            report = server.wait_for("pi-07", "rpt", deadline_s=STEP_S)
            assert (report.release, report.head, report.error) == (1, "logistic", "")
            assert report.metrics[metrics.PERSONAL_AFTER] == 1.0
            server.ack("pi-07", report.id)
            server.wait_for(
                "pi-07", "state", lambda s: (s.status, s.release) == ("ready", 1), deadline_s=STEP_S
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{(tmp_path / 'agent.log').read_text()[-3000:]}") from error
        assert systemd.heard("READY=1")
        learnt_s = time.monotonic()
        predict = ["/usr/local/bin/edge-fl", "device", "predict", "--format", "json", "/srv/images/b/3.png"]
        assert [row["label"] for row in json.loads(pi.run(*predict))] == ["b"]
    server.wait_for("pi-07", "state", lambda s: s.status == "lost")  # its power was cut
    activities = [state.activity for state in server.messages("pi-07", "state")]
    assert [*dict.fromkeys(activities)][:5] == ["idle", "fetching", "installing", "fitting", "reporting"]
    server.leave()
    with capsys.disabled():
        sys.stdout.write(
            f"\naarch64 under qemu: wheelhouse {wheelhouse / 1e6:.1f} MB, installed "
            f"{folder_bytes(pi.root / 'opt/edge-fl') / 1e6:.0f} MB; flash {flashed_s - began_s:.0f} s, install "
            f"{installed_s - flashed_s:.0f} s (again {again_s - installed_s:.1f} s), birth {born_s - again_s:.0f} s, "
            f"report {learnt_s - born_s:.0f} s\n"
        )


def server_endpoint(broker: Mosquitto, issue: Issue) -> Endpoint:
    ca, cert, key = issue("server")
    return Endpoint("127.0.0.1", broker.endpoint.port, ca, cert, key)


def as_systemd_does(pi: Pi, notify: str) -> list[str]:
    """The command of the installed unit, as its user."""
    unit = dict(line.split("=", 1) for line in (pi.root / UNIT).read_text().splitlines() if "=" in line)
    user = f"--reuid={unit['User']} --regid={unit['User']} --clear-groups".split()
    return [
        "setpriv",
        *user,
        "env",
        "HOME=/var/lib/edge-fl",
        f"NOTIFY_SOCKET={notify}",
        *unit["ExecStart"].split(),
    ]


class Listener:
    """The socket that systemd would listen on."""

    def __enter__(self) -> Listener:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(5)
        name = f"edge-fl-{time.monotonic_ns()}"
        self._socket.bind(f"\0{name}")
        self.address = f"@{name}"
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def heard(self, word: str) -> bool:
        return self._socket.recv(100).decode() == word
