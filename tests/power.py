"""A disk whose power can be cut: what was not written to it by then is lost, as on a board. It needs root and loop devices."""

import os
import subprocess
from pathlib import Path
from types import TracebackType

import pytest

MOUNT_S = 60


class Disk:
    """An ext4 file system in the file `image`, mounted over the folder `at` with a copy of its content, while the block runs."""

    def __init__(self, image: Path, at: Path, mebibytes: int) -> None:
        if os.geteuid() or not Path("/dev/loop-control").exists():
            pytest.skip("not root, or no loop devices: no disk can be mounted")
        self._image, self._at, self._mebibytes = image, at, mebibytes

    def __enter__(self) -> "Disk":
        _run("mke2fs", "-q", "-t", "ext4", "-m", "0", "-d", self._at, self._image, f"{self._mebibytes}M")
        before = self._at.stat()
        self._mount()
        os.chown(self._at, before.st_uid, before.st_gid)
        self._at.chmod(before.st_mode)
        os.sync()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _run("umount", "--lazy", self._at)
        self._image.unlink()

    def cut(self) -> None:
        """Cut the power of the disk, and start it again; processes that use it have been killed before."""
        before = self._image
        self._image = before.with_name(f"{before.name}+")
        _run("cp", "--sparse=always", before, self._image)
        _run("umount", "--lazy", self._at)
        before.unlink()
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", self._image, self._at)


def fill(path: str) -> None:
    """Fill the disk up with a file."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    for size in (1 << 20, 4096, 1):
        try:
            while True:
                os.write(file, bytes(size))
        except OSError:
            pass
    os.close(file)


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=MOUNT_S)
