"""`flash --ssh` with OpenSSH and sudo themselves: an sshd on loopback, in a mount namespace with accounts, sudoers and /home of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from edge_fl.errors import ConfigError, ConnectError, RunError
from edge_fl_devices.flash.bundle import INSTALL, File
from edge_fl_devices.flash.card_contents import CardContents
from edge_fl_devices.flash.changes import apply_changes, plan_changes
from edge_fl_devices.flash.targets.ssh import HOME, Ssh
from tests.accounts import reachable

MakeContents = Callable[[tuple[str, ...]], CardContents]
UID = 61234
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
NEEDED = SSHD and shutil.which("sudo") and shutil.which("ssh-keygen") and shutil.which("unshare")
pytestmark = pytest.mark.skipif(
    not NEEDED or os.getuid() != 0, reason="needs root, openssh-server, sudo and unshare"
)
SET_UP = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd
mount -t tmpfs -o mode=755 tmpfs /home
install -d -m 700 -o {uid} -g {uid} /home/pi /home/pi/.ssh
install -m 600 -o {uid} -g {uid} {here}/key.pub /home/pi/.ssh/authorized_keys
cp -a /etc /run/etc 2>/dev/null || true # files that other processes remove meanwhile
for name in passwd group shadow; do cat {here}/$name >>/run/etc/$name; done
rm -rf /run/etc/sudoers.d/*
rm /run/etc/sudoers; mkdir /run/sudoers; mount --bind {here}/rules /run/sudoers; ln -s /run/sudoers/all /run/etc/sudoers
mount --bind /run/etc /etc
mkdir -p /run/bin
cp {here}/bin/* /run/bin/
exec {sshd} -D -e -f {here}/sshd_config
"""
CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {here}/host
PidFile none
UsePAM no
AuthorizedKeysFile .ssh/authorized_keys
StrictModes no
SetEnv PATH=/run/bin:/usr/bin:/bin
"""
PROGRAMS = {
    "dpkg": "echo arm64",
    "systemctl": "echo running",
    "python3": 'case "$*" in *ensurepip*) ;; *) echo 3.11 ;; esac',
    "df": "echo head; echo /dev/root 1 1 2000000 1% /",
}


class Pi:
    """A running sshd; `ns` is the root of its namespace."""

    def __init__(self, process: subprocess.Popen[bytes], here: Path) -> None:
        self.process, self.here, self.ns = process, here, Path(f"/proc/{process.pid}/root")

    @property
    def home(self) -> set[str]:
        return {path.name for path in (self.ns / "home/pi").iterdir()} - {".ssh"}

    def sudoers(self, line: str) -> None:
        (self.here / "rules/all").write_text(f"Defaults env_reset\nroot ALL=(ALL:ALL) ALL\n{line}\n")


@pytest.fixture
def pi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pi]:
    here = reachable(tmp_path) / "sshd"
    (here / "bin").mkdir(parents=True)
    for name in ("key", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", here / name], check=True)
    for name, text in PROGRAMS.items():
        (here / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (here / "bin" / name).chmod(0o755)
    for name, line in (
        ("passwd", f"pi:x:{UID}:{UID}::/home/pi:/bin/sh\n"),
        ("group", f"pi:x:{UID}:\n"),
        ("shadow", "pi:*:19000:0:99999:7:::\n"),
    ):
        (here / name).write_text(line)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (here / "sshd_config").write_text(CONFIG.format(port=port, here=here))
    (here / "rules").mkdir()
    (here / "ssh").write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -p {port} -i {here}/key -o StrictHostKeyChecking=no"
        f' -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o BatchMode=yes "$@"\n'
    )
    (here / "ssh").chmod(0o755)
    script = SET_UP.format(uid=UID, here=here, sshd=SSHD)
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        assert process.stderr
        said = b""
        while b"listening" not in said:
            line = process.stderr.readline()
            if not line:
                pytest.skip(f"sshd does not start here: {said.decode()}")
            said += line
        board = Pi(process, here)
        board.sudoers("pi ALL=(ALL) NOPASSWD: ALL")
        monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
        yield board
    finally:
        process.kill()
        process.communicate()


def test_a_sudo_that_asks_for_a_password_is_told_before_anything_is_sent(
    pi: Pi, contents: MakeContents
) -> None:
    for line in ("pi ALL=(ALL) ALL", ""):
        pi.sudoers(line)
        with pytest.raises(
            ConfigError, match=r"sudo does not work without a password \(sudo: .*password.*--out"
        ):
            plan_changes(Ssh("pi@127.0.0.1"), contents)
        assert pi.home == set()


def test_the_bundle_is_installed_as_root_from_a_private_folder_and_gone(
    pi: Pi, contents: MakeContents
) -> None:
    target = Ssh("pi@127.0.0.1")
    new, old = plan_changes(target, contents)
    seen = f"stat -c '%a %u' {HOME} {HOME}/edge-fl/identity/client.key; id -u"
    script = f"#!/bin/sh\nexec >/run/seen 2>&1\ncd ~pi\n{seen}\necho root >{HOME}/edge-fl/install.log\n"
    new = [File(INSTALL, script.encode(), 0o755) if file.path == INSTALL else file for file in new]
    apply_changes(target, new, old)
    assert (pi.ns / "run/seen").read_text() == f"700 {UID}\n600 {UID}\n0\n"
    assert pi.home == set()


@pytest.mark.parametrize("how", ["Ctrl-C", "connection lost", "sshd killed"])
def test_nothing_stays_on_the_pi_when_sending_is_cut_off(
    pi: Pi, contents: MakeContents, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    target = Ssh("pi@127.0.0.1")
    new, old = plan_changes(target, contents)
    read = File.read

    def cut_off(file: File) -> bytes:
        if file.path.endswith(".whl"):
            wait_until(lambda: pi.home == {HOME})
            if how == "Ctrl-C":
                raise KeyboardInterrupt
            wanted = "ssh" if how == "connection lost" else "sshd"
            for pid in family(os.getpid() if wanted == "ssh" else pi.process.pid):
                with suppress(FileNotFoundError, ProcessLookupError):  # one that has ended meanwhile
                    if Path(f"/proc/{pid}/comm").read_text().strip() == wanted and pid != pi.process.pid:
                        os.kill(pid, signal.SIGKILL)
            return bytes(1 << 22)  # more than pipes hold
        return read(file)

    monkeypatch.setattr(File, "read", cut_off)
    with pytest.raises(KeyboardInterrupt if how == "Ctrl-C" else (ConnectError, RunError)):
        apply_changes(target, new, old)
    wait_until(lambda: pi.home == set())


def family(pid: int) -> list[int]:
    """The processes below one; none if it has ended."""
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(each for child in children for each in family(child))]


def wait_until(holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    ends_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.02)
