"""The boot partition in an image file or on an unmounted card as a target, accessed with mtools without mounting or root."""

from __future__ import annotations

import os
import re
import stat
import struct
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import final

from edge_fl.errors import ConfigError, RunError
from edge_fl.files.paths import text
from edge_fl_devices.flash.bundle import File
from edge_fl_devices.flash.targets.base import Target, require_writable, supported_pythons

SECTOR = 512
FAT_TYPES = (0x0B, 0x0C, 0x0E)
DEADLINE_S = 600
SYS = Path("/sys/dev/block")
MOUNTS = Path("/proc/self/mounts")


@final
class Image(Target):
    """A published image of the operating system, or the block device of a card."""

    is_boot_partition = True

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, text(path)
        if stat.S_ISBLK(path.stat().st_mode):
            check_removable(path)
        self._at = f"{text(path)}@@{partition(path)}"

    def pythons(self) -> tuple[str, ...]:
        listing = self._run("mdir", "-b", "::/").decode("utf-8", "replace").splitlines()
        names = {line.removeprefix("::/") for line in listing}
        pythons = supported_pythons(names, self.read, self.name)
        require_writable(self._path)
        return pythons

    def read(self, path: str) -> bytes | None:
        done = self._start("mtype", _pattern(path))
        return None if done.returncode else done.stdout

    def free_bytes(self) -> int:
        last = self._run("mdir", "::/").decode("utf-8", "replace")
        found = re.search(r"([\d ]+) bytes free", last)
        return int(found[1].replace(" ", "")) if found else 0

    def remove(self, paths: Collection[str]) -> None:
        for path in paths:
            self._start("mdel", _pattern(path))

    def write(self, files: Sequence[File]) -> None:
        for folder in sorted(
            {os.fspath(parent) for file in files for parent in Path(file.path).parents} - {"."}
        ):
            self._start("mmd", "-D", "s", _new(folder))  # fails if the folder exists
        for file in files:
            source = str(file.content) if isinstance(file.content, Path) else "-"
            content = b"" if isinstance(file.content, Path) else file.content
            self._run("mcopy", "-o", source, _new(file.path), input=content)
        with self._path.open("rb") as image:
            os.fsync(image.fileno())

    def _run(self, program: str, *arguments: str, input: bytes = b"") -> bytes:
        done = self._start(program, *arguments, input=input)
        if done.returncode:
            why = " ".join(done.stderr.decode("utf-8", "replace").split())
            raise RunError(f"{self.name}: {program} {arguments[-1]}: {why}", consequence="flash it again")
        return done.stdout

    def _start(self, program: str, *arguments: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [program, "-i", self._at, *arguments]
        environment = {**os.environ, "MTOOLS_SKIP_CHECK": "1", "LC_ALL": "C.UTF-8"}
        try:
            return subprocess.run(
                command, input=input, capture_output=True, env=environment, timeout=DEADLINE_S, check=False
            )
        except FileNotFoundError as error:
            raise ConfigError(
                f"{program} is not installed; install it (Debian: apt install mtools), or mount the boot partition and "
                "give its folder"
            ) from error


def _pattern(path: str) -> str:
    """Return mtools' pattern for one existing path."""
    return f"::/{path.replace('[', '[[]')}"


def _new(path: str) -> str:
    """Return mtools' name for a new path: its folders are a pattern, its last part is not."""
    parent, _, name = path.rpartition("/")
    return f"{_pattern(parent)}/{name}" if parent else f"::/{name}"


def partition(path: Path) -> int:
    """Return the offset of the first FAT partition in bytes. Raises ConfigError if the file is not an image of a card."""
    try:
        with path.open("rb") as file:
            sector = file.read(SECTOR)
    except OSError as error:
        raise ConfigError(f"{text(path)}: {error.strerror}; expected an image or a card") from error
    not_an_image = ConfigError(
        f"{text(path)}: not an image of a card (no partition table with a FAT partition in front); "
        "expected an unpacked .img of 64-bit Raspberry Pi OS"
    )
    if len(sector) < SECTOR or sector[510:] != b"\x55\xaa":
        raise not_an_image
    if sector[82:87] == b"FAT32":
        return 0  # the partition itself, as in /dev/sda1
    kind, start = struct.unpack_from("<4xB3xI", sector, 446)
    if kind not in FAT_TYPES or not start:
        raise not_an_image
    return int(start) * SECTOR


def check_removable(path: Path, sys: Path = SYS, mounts: Path = MOUNTS) -> None:
    """Raise ConfigError for a fixed disk, and for one that is mounted."""
    number = path.stat().st_rdev
    device = (sys / f"{os.major(number)}:{os.minor(number)}").resolve()
    disk = device.parent if (device / "partition").exists() else device
    if _text(disk / "removable") != "1" and _text(disk / "device" / "type") != "SD":
        raise ConfigError(
            f"{text(path)}: is a disk that is not removable; expected a card or a USB stick, or an image file"
        )
    used = [line.split()[:2] for line in _text(mounts).splitlines()]
    for source, folder in used:
        if source.startswith("/dev/") and Path(source).name.startswith(disk.name):
            raise ConfigError(
                f"{text(path)}: {source} is mounted at {folder}; give that folder (--boot {folder}) or unmount it"
            )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
