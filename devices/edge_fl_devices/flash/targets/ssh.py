"""A running Pi as a target: the bundle is sent over ssh into a private folder and installed with sudo."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Collection, Sequence
from typing import IO, final

from edge_fl.errors import ConfigError, ConnectError, DeadlineError, RunError
from edge_fl_devices.flash.bundle import FOLDER, MANIFEST, File
from edge_fl_devices.flash.targets.base import Target
from edge_fl_devices.flash.wheels import PYTHONS

OPTIONS = ("-o", "ConnectTimeout=15")
DEADLINE_S = 1800
HOME = ".edge-fl-flash"
SSH_FAILED = 255  # exit code of ssh itself
INSTALLED = "/opt/edge-fl/bundle.sha256"
PROBE = f"""
echo "machine $(dpkg --print-architecture 2>/dev/null || uname -m)"
echo "python $(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"
echo "free $(df -Pk . | tail -n 1 | tr -s ' ' | cut -d ' ' -f 4)"
touch .edge-fl-probe 2>/dev/null && rm -f .edge-fl-probe && echo "writable yes"
cat {INSTALLED} 2>/dev/null | sed 's/^/bundle /'
true
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
        if "writable" not in self._facts:
            raise ConfigError(f"{self.name}: its home folder is read-only")
        return (python,)

    def read(self, path: str) -> bytes | None:
        return self._bundle.encode() if path == MANIFEST and self._bundle else None

    def free_bytes(self) -> int:
        return 1024 * int(self._facts.get("free") or 0)

    def remove(self, paths: Collection[str]) -> None:
        """Do nothing: the sent files are removed after the installation."""

    def write(self, files: Sequence[File]) -> None:
        unpack = f"rm -rf {HOME} && mkdir -m 700 {HOME} && tar -x -f - -C {HOME}"
        self._ssh(unpack, files)
        self._ssh(f"sudo sh {HOME}/{FOLDER}/install.sh && sudo rm -rf {HOME}")

    def next_step(self) -> str:
        return "the agent is running"

    def _ssh(self, script: str, files: Sequence[File] = ()) -> str:
        command = ["ssh", *OPTIONS, self._where, script]
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as process:
                if files and process.stdin:
                    _send(files, process.stdin)
                out, err = process.communicate(timeout=DEADLINE_S)
        except FileNotFoundError as error:
            raise ConfigError("ssh is not installed here") from error
        except BrokenPipeError as error:
            raise ConnectError(f"{self.name}: ssh ended before everything was sent") from error
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{self.name}: not done after {DEADLINE_S} s") from error
        why = " ".join((err or out).decode("utf-8", "replace").split()[-40:])
        if process.returncode == SSH_FAILED:
            raise ConnectError(f"{self.name}: ssh: {why}", consequence="nothing was sent")
        if process.returncode:
            raise RunError(f"{self.name}: {why}", consequence="flash it again")
        return out.decode("utf-8", "replace")


def _send(files: Sequence[File], out: IO[bytes]) -> None:
    with tarfile.open(fileobj=out, mode="w|") as archive:
        for file in files:
            content = file.read()
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode = len(content), file.mode
            archive.addfile(entry, io.BytesIO(content))
