"""From an image to a prediction on aarch64: flashed, installed offline as the first boot does, and run against a real broker."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from broker.mosquitto import Mosquitto
from edge_fl import metrics
from edge_fl.cli import main
from tests.arm64 import site, userland
from tests.arm64.pi import Pi, require
from tests.conftest import Issue
from tests.devices.flash import cards

pytestmark = [
    pytest.mark.arm64,
    pytest.mark.broker,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not shutil.which("mformat"), reason="no mtools here"),
]
UNIT = "etc/systemd/system/edge-fl.service"
STEP_S = 480


def test_a_flashed_card_installs_itself_learns_and_predicts(
    broker: Mosquitto, issue: Issue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require()
    began_s = time.monotonic()
    base = userland.build(userland.BASE)
    card = cards.image(tmp_path / "sd.img", site.issued_for(userland.python(base)), mebibytes=192)
    flash = site.flash(card, "127.0.0.1", broker, site.identity(issue, tmp_path / "id"))
    assert main([*flash, "--images", str(site.pictures(tmp_path / "images"))]) == 0
    flashed_s = time.monotonic()

    pi = Pi(card, userland.copy(base, tmp_path / "pi"))
    wheelhouse = bytes_in(pi.boot / "edge-fl/wheels")
    pi.run(*first_boot(pi))
    assert (pi.boot / "edge-fl/install.log").read_text().endswith("edge-fl: install rc=0\n")
    assert (pi.boot / "cmdline.txt").read_text() == f"{cards.CMDLINE}\n" and not (
        pi.boot / "firstrun.sh"
    ).exists()
    assert not {"identity", "images"} & {path.name for path in (pi.boot / "edge-fl").iterdir()}
    assert pi.run("stat", "-c", "%a %U", "/etc/edge-fl/identity/client.key") == "600 edge-fl\n"
    installed_s = time.monotonic()
    shutil.copytree(tmp_path / "id", pi.boot / "edge-fl/identity")
    (pi.root / "etc/edge-fl/identity/mine").touch()  # the device may change its identity folder
    pi.run("/bin/sh", "/boot/firmware/edge-fl/install.sh")  # a second installation changes nothing
    assert (pi.root / "etc/edge-fl/identity/mine").exists() and not (pi.boot / "edge-fl/identity").exists()
    again_s = time.monotonic()

    agent, log = Listener(), tmp_path / "agent.log"
    with site.serving(broker, issue, tmp_path / "server") as server, agent as systemd:
        with pi.running(*as_systemd_does(pi, systemd.address), log=log):
            try:
                meta = server.wait_for(site.DEVICE, "meta", deadline_s=STEP_S)
                assert (meta.machine, meta.samples) == ("aarch64", site.SAMPLES)
                born_s = time.monotonic()
                report = server.wait_for(site.DEVICE, "rpt", deadline_s=STEP_S)
                assert (report.release, report.head, report.error) == (1, "logistic", "")
                assert report.metrics[metrics.PERSONAL_AFTER] == 1.0
                server.ack(site.DEVICE, report.id)
                server.wait_for(site.DEVICE, "state", lambda s: (s.status, s.release) == ("ready", 1))
            except AssertionError as error:
                raise AssertionError(f"{error}\n{log.read_text()[-3000:]}") from error
            learnt_s = time.monotonic()
            assert systemd.received("READY=1")
            predict = "/usr/local/bin/edge-fl device predict --format json /srv/images/b/3.png"
            assert [row["label"] for row in json.loads(pi.run(*predict.split()))] == ["b"]
        server.wait_for(site.DEVICE, "state", lambda s: s.status == "lost")  # its power was cut
        did = [state.activity for state in server.messages(site.DEVICE, "state")]
        assert [*dict.fromkeys(did)][:5] == ["idle", "fetching", "installing", "fitting", "reporting"]
    with capsys.disabled():
        sys.stdout.write(
            f"\naarch64 under qemu: wheelhouse {wheelhouse / 1e6:.1f} MB, installed "
            f"{bytes_in(pi.root / 'opt/edge-fl') / 1e6:.0f} MB; flash {flashed_s - began_s:.0f} s, install "
            f"{installed_s - flashed_s:.0f} s (again {again_s - installed_s:.1f} s), birth {born_s - again_s:.0f} s, "
            f"report {learnt_s - born_s:.0f} s\n"
        )


def first_boot(pi: Pi) -> list[str]:
    """Return the command that the card makes systemd or cloud-init run."""
    words = (pi.boot / "cmdline.txt").read_text().partition(" systemd.run=")[2]
    if words:
        return ["/bin/sh", words.split()[0]]
    from ruamel.yaml import YAML

    command: list[str] = YAML(typ="safe").load((pi.boot / "user-data").read_text())["runcmd"][-1]
    return command


def as_systemd_does(pi: Pi, notify: str) -> list[str]:
    """Return the command of the installed unit, as its user."""
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


def bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


class Listener:
    """The notification socket of systemd."""

    def __enter__(self) -> Listener:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(5)
        name = f"edge-fl-{time.monotonic_ns()}"
        self._socket.bind(f"\0{name}")
        self.address = f"@{name}"
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def received(self, word: str) -> bool:
        return self._socket.recv(100).decode() == word
