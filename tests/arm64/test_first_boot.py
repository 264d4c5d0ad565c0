"""From an image to a prediction on aarch64, with a pretrained backbone in the bundle.

Flashed, installed offline as the first boot does, and run against a real broker.
"""

import json
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from edge_fl import metrics
from edge_fl.cli import main
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.board.installation import INSTALLER, LABEL_SERVICE, SERVICE
from edge_fl_server.release import website
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
STEP_S = 480


@pytest.mark.long
def test_a_flashed_card_installs_itself_learns_and_predicts(
    broker: Mosquitto, issue: Issue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require()
    began_s = time.monotonic()
    base = userland.build(userland.BASE)
    card = cards.image(tmp_path / "sd.img", site.issued_for(userland.python(base)), mebibytes=192)
    repository = site.backbone(tmp_path / "server", size=96)  # a fifth of the emulated work
    website.export(repository, tmp_path / "releases")
    identity = site.identity(issue, tmp_path / "id")
    flash = site.flash(card, "127.0.0.1", broker, identity, tmp_path / "releases")
    assert main([*flash, "--images", str(site.pictures(tmp_path / "images")), "--label-page"]) == 0
    flashed_s = time.monotonic()

    pi = Pi(card, userland.copy(base, tmp_path / "pi"))
    wheelhouse = bytes_in(pi.boot / "edge-fl/wheels")
    pi.run(*first_boot(pi))
    pi.run(*entry(pi, INSTALLER, "ExecStart").split())  # as systemd does at the next boot
    assert (pi.boot / "edge-fl/install.log").read_text().endswith("edge-fl: install rc=0\n")
    assert (pi.boot / "cmdline.txt").read_text() == f"{cards.CMDLINE}\n" and not (
        pi.boot / "firstrun.sh"
    ).exists()
    assert not {"identity", "images", "releases"} & {path.name for path in (pi.boot / "edge-fl").iterdir()}
    assert pi.run("stat", "-c", "%a %U", "/etc/edge-fl/identity/client.key") == "600 edge-fl\n"
    as_user = "setpriv --reuid=1000 --regid=1000 --clear-groups sh -c".split()
    pi.run(*as_user, "cd /srv/images && mv a/0.png a/first.png && mkdir c && rmdir c")
    owned = "1000 edge-fl 2775\n1000 edge-fl 664\n"
    assert pi.run("stat", "-c", "%u %G %a", "/srv/images", "/srv/images/a/first.png") == owned
    label = (pi.root / "etc/systemd/system/multi-user.target.wants" / LABEL_SERVICE).readlink()
    assert label.name == LABEL_SERVICE and entry(pi, LABEL_SERVICE, "User") == "edge-fl"
    as_agent = "setpriv --reuid=edge-fl --regid=edge-fl --init-groups sh -c".split()
    pi.run(*as_agent, "cd /srv/images && mkdir c && mv a/first.png c && mv c/first.png a && rmdir c")
    installed_s = time.monotonic()
    shutil.copytree(tmp_path / "id", pi.boot / "edge-fl/identity")
    (pi.root / "etc/edge-fl/identity/mine").touch()  # the device may change its identity folder
    pi.run("/bin/sh", "/boot/firmware/edge-fl/install.sh")  # a second installation changes nothing
    assert (pi.root / "etc/edge-fl/identity/mine").exists() and not (pi.boot / "edge-fl/identity").exists()
    again_s = time.monotonic()

    agent, log = Listener(), tmp_path / "agent.log"
    with site.serving(broker, issue, repository) as server, agent as systemd:
        with pi.running(*as_systemd_does(pi, systemd.address), log=log):
            try:
                meta = server.wait_for(site.DEVICE, "meta", lambda m: m.samples, deadline_s=STEP_S)
                assert (meta.machine, meta.samples) == ("aarch64", site.SAMPLES)
                born_s = time.monotonic()
                report = server.wait_for(site.DEVICE, "rpt", deadline_s=STEP_S)
                assert (report.release, report.head, report.error) == (1, "cosine", "")
                assert (report.metrics[metrics.PERSONAL_AFTER], report.bytes_down) == (1.0, 0)
                server.ack(site.DEVICE, report.id)
                server.wait_for(site.DEVICE, "state", lambda s: (s.status, s.release) == ("ready", 1))
            except AssertionError as error:
                raise AssertionError(f"{error}\n{log.read_text()[-3000:]}") from error
            learnt_s = time.monotonic()
            assert systemd.received("READY=1")
            predict = "/usr/local/bin/edge-fl device predict --format json /srv/images/b/3.png"
            assert [row["label"] for row in json.loads(pi.run(*predict.split()))] == ["b"]
            export = "/usr/local/bin/edge-fl device export /tmp/fused.onnx"
            assert pi.attempt(*export.split()) == 4  # no package onnx there, but on the computer
            shutil.copytree(pi.root / "var/lib/edge-fl", tmp_path / "copy")
            export = f"device export {tmp_path / 'fused.onnx'} --dir {tmp_path / 'copy'}"
            assert main(export.split()) == 0
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
    """Return the command that the card makes systemd run once."""
    return ["/bin/sh", (pi.boot / "cmdline.txt").read_text().partition(" systemd.run=")[2].split()[0]]


def entry(pi: Pi, unit: str, name: str) -> str:
    """Return an entry of an installed unit."""
    text = (pi.root / "etc/systemd/system" / unit).read_text()
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)[name]


def as_systemd_does(pi: Pi, notify: str) -> list[str]:
    """Return the command of the installed unit, as its user."""
    name = entry(pi, SERVICE, "User")
    user = f"--reuid={name} --regid={name} --clear-groups".split()
    return [
        "setpriv",
        *user,
        "env",
        "HOME=/var/lib/edge-fl",
        f"NOTIFY_SOCKET={notify}",
        *entry(pi, SERVICE, "ExecStart").split(),
    ]


def bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


class Listener:
    """The notification socket of systemd."""

    def __enter__(self) -> "Listener":
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
