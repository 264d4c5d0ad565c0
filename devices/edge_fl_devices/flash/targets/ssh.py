"""A running Pi as a target: the bundle is sent over ssh into a private folder, installed with sudo, and removed.

What the installation needs is probed before anything is sent. One command then unpacks, installs and removes, so nothing stays behind,
however it ends: if the connection is lost or Ctrl-C is pressed while files are sent, the Pi sees the end of its input and removes what
it has; an installation that has begun goes on to its end.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import tarfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import IO, final

from edge_fl.errors import ConfigError, ConnectError, DeadlineError, RunError
from edge_fl.untrusted import whole
from edge_fl_devices.flash.bundle import FOLDER, MANIFEST, File
from edge_fl_devices.flash.targets.base import Target
from edge_fl_devices.flash.wheels import PYTHONS

OPTIONS = ("-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
DEADLINE_S = 1800
HOME = ".edge-fl-flash"
SSH_FAILED = 255  # exit code of ssh itself
INSTALLED = "/opt/edge-fl/bundle.sha256"
UNSENT = "nothing was sent"
MAX_MB = 10**12
SPARE_MB = 600  # as in install.sh
ROOT = '[ "$(id -u)" = 0 ] || sudo="sudo -n"'
"""Sets the command that makes a command run as root without a question; ssh gives sudo no terminal to ask on."""
PROBE = f"""
sudo=; {ROOT}
echo "machine $(dpkg --print-architecture 2>/dev/null || uname -m)"
echo "python $(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"
python3 -c 'import ensurepip, venv' 2>/dev/null && echo "venv yes"
case $(systemctl is-system-running 2>/dev/null) in ""|offline|unknown) ;; *) echo "systemd yes" ;; esac
echo "free $(df -Pk . | tail -n 1 | tr -s ' ' | cut -d ' ' -f 4)"
echo "opt $(df -Pm /opt 2>/dev/null | tail -n 1 | tr -s ' ' | cut -d ' ' -f 4)"
rm -rf {HOME} 2>/dev/null; mkdir -m 700 {HOME} 2>/dev/null && rmdir {HOME} && echo "writable yes"
refused=$($sudo true 2>&1) && echo "root yes" || echo "refused $(echo "$refused" | tail -n 1)"
cat {INSTALLED} 2>/dev/null | sed 's/^/bundle /'
true
"""
INSTALL = f"""
sudo=; {ROOT}
umask 077
trap "$sudo rm -rf '$PWD/{HOME}'" EXIT
trap 'exit 130' HUP INT PIPE TERM
$sudo rm -rf {HOME} && mkdir {HOME} && timeout {DEADLINE_S} tar -x -f - -C {HOME} || exit
[ -f {HOME}/{MANIFEST} ] || {{ echo "not all files arrived" >&2; exit 1; }} # it is the last one
$sudo sh {HOME}/{FOLDER}/install.sh </dev/null
"""


@final
class Ssh(Target):
    """`where` is an argument of ssh: user@host, or a host of its configuration."""

    def __init__(self, where: str) -> None:
        if where.startswith("-"):
            raise ConfigError(f"--ssh {where}: expected user@host")
        self._where, self.name = where, where
        self._facts: dict[str, str] = {}
        self._bundle = ""

    def pythons(self) -> tuple[str, ...]:
        lines = [line.partition(" ") for line in self._ssh(PROBE).splitlines()]
        self._facts = {key: value for key, _, value in lines if key != "bundle"}
        self._bundle = "".join(f"{value}\n" for key, _, value in lines if key == "bundle")
        machine, python = self._facts.get("machine", ""), self._facts.get("python", "")
        if machine not in ("arm64", "aarch64"):
            raise ConfigError(
                f"{self.name}: its system is {machine or 'unknown'}; expected 64-bit Raspberry Pi OS (arm64), because "
                "onnxruntime has no 32-bit wheel"
            )
        if python not in PYTHONS.values():
            raise ConfigError(
                f"{self.name}: Python {python or 'is missing'}; expected {' or '.join(PYTHONS.values())} "
                "(Raspberry Pi OS Bookworm or Trixie)"
            )
        self._require("venv", "Python has no venv module; on it: sudo apt install python3-venv")
        self._require("systemd", "systemd does not run; expected Raspberry Pi OS, whose services it starts")
        self._require(
            "root",
            f"sudo does not work without a password ({self._facts.get('refused') or 'not installed'}); allow it there, or write the"
            " bundle to a folder with --out, copy that, and run its install.sh with sudo by hand",
        )
        self._require("writable", "its home folder is full or read-only")
        opt = self._facts.get("opt", "")
        if (whole(opt, MAX_MB) or 0) < SPARE_MB:
            raise ConfigError(
                f"{self.name}: {opt or 'no'} MB are free in /opt; expected {SPARE_MB}", consequence=UNSENT
            )
        return (python,)

    def _require(self, fact: str, otherwise: str) -> None:
        if fact not in self._facts:
            raise ConfigError(f"{self.name}: {otherwise}", consequence=UNSENT)

    def read(self, path: str) -> bytes | None:
        return self._bundle.encode() if path == MANIFEST and self._bundle else None

    def free_bytes(self) -> int:
        return 1024 * int(self._facts.get("free") or 0)

    def remove(self, paths: Collection[str]) -> None:
        """Do nothing: the sent files are removed after the installation."""

    def write(self, files: Sequence[File]) -> None:
        self._ssh(INSTALL, files)

    def next_step(self) -> str:
        return "the agent is running"

    def _ssh(self, script: str, files: Sequence[File] = ()) -> str:
        command = ["ssh", *OPTIONS, self._where, f"sh -c {shlex.quote(script)}"]  # whatever the user's shell
        sent = UNSENT if not files else "what was sent was removed; flash it again"
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as process:
                try:
                    if files and process.stdin:
                        _send(files, process.stdin)
                    out, err = process.communicate(timeout=DEADLINE_S)
                except BrokenPipeError:  # it ended early; its last words say why
                    with suppress(BrokenPipeError):
                        process.stdin.close()  # type: ignore[union-attr]
                    process.stdin = None
                    out, err = process.communicate(timeout=DEADLINE_S)
                except (
                    BaseException
                ):  # Ctrl-C, or a file that cannot be read: without ssh the Pi removes what it has
                    process.kill()
                    raise
        except FileNotFoundError as error:
            raise ConfigError("ssh is not installed here") from error
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{self.name}: not done after {DEADLINE_S} s") from error
        why = " ".join((err or out).decode("utf-8", "replace").split()[-40:])
        if process.returncode == SSH_FAILED:
            raise ConnectError(f"{self.name}: ssh: {why}", consequence=sent)
        if process.returncode:
            raise RunError(f"{self.name}: {why}", consequence=sent)
        return out.decode("utf-8", "replace")


def _send(files: Sequence[File], out: IO[bytes]) -> None:
    with tarfile.open(fileobj=out, mode="w|") as archive:
        for file in files:
            content = file.read()
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode = len(content), file.mode
            archive.addfile(entry, io.BytesIO(content))
