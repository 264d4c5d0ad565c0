"""Folders as targets: the mounted boot partition of a card, and a plain folder to copy by hand."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import final

from edge_fl.errors import ConfigError, RunError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl_devices.flash.bundle import File
from edge_fl_devices.flash.targets.base import Target, require_writable, supported_pythons


class _Folder(Target):
    def __init__(self, folder: Path) -> None:
        self._folder, self.name = folder, text(folder)

    def read(self, path: str) -> bytes | None:
        try:
            return (self._folder / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(
                f"{self.name}: {path}: {error.strerror}", consequence="nothing was written"
            ) from error

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    def remove(self, paths: Collection[str]) -> None:
        for path in paths:
            (self._folder / path).unlink(missing_ok=True)

    def write(self, files: Sequence[File]) -> None:
        for file in files:
            path = self._folder / file.path
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic.writing(path) as out:
                    if os.name == "posix":
                        _restrict(out.fileno(), file.mode)
                    out.write(file.read())
            except OSError as error:
                raise RunError(
                    f"{self.name}: {file.path}: {error.strerror}",
                    consequence="flash it again to continue from here",
                ) from error


@final
class BootFolder(_Folder):
    """The mounted FAT partition of a card (`bootfs`)."""

    is_boot_partition = True

    def pythons(self) -> tuple[str, ...]:
        if not self._folder.is_dir():
            raise ConfigError(f"{self.name}: no such folder; expected a mounted boot partition")
        names = {path.name for path in self._folder.iterdir()}
        pythons = supported_pythons(names, self.read, self.name)
        require_writable(self._folder)
        return pythons


@final
class OutFolder(_Folder):
    """A folder on this computer to copy to the Pi, where `sudo sh edge-fl/install.sh` installs it."""

    def __init__(self, folder: Path, pythons: tuple[str, ...]) -> None:
        super().__init__(folder)
        self._pythons = pythons

    def pythons(self) -> tuple[str, ...]:
        if self._folder.exists() and not self._folder.is_dir():
            raise ConfigError(f"{self.name}: is a file; expected a folder")
        require_writable(self._existing)
        return self._pythons

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._existing).free

    def write(self, files: Sequence[File]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().write(files)

    @property
    def _existing(self) -> Path:
        """The folder, or its nearest existing parent."""
        absolute = self._folder.absolute()
        return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())

    def next_step(self) -> str:
        return f"on the Pi: sudo sh {self.name}/edge-fl/install.sh"


def _restrict(descriptor: int, mode: int) -> None:
    """Set the mode if the file system supports modes; FAT does not."""
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
