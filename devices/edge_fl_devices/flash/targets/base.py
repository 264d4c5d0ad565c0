"""Interface of the targets to which a bundle can be written."""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl_devices.flash.bundle import File


class Target(ABC):
    """Reads and writes files by path. `name` starts every message; `is_boot_partition` requires edits of the boot files."""

    name: str
    is_boot_partition: bool = False

    @abstractmethod
    def pythons(self) -> tuple[str, ...]:
        """Check the target and return the Python versions it may have. Raises ConfigError when the bundle would not run there."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return a file's content, None if it does not exist."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the free space."""

    @abstractmethod
    def remove(self, paths: Collection[str]) -> None:
        """Remove files; missing ones are ignored."""

    @abstractmethod
    def write(self, files: Sequence[File]) -> None:
        """Write files in this order; return once they are on the disk."""

    def next_step(self) -> str:
        """Describe what to do or expect after the bundle is written."""
        return "put the card into the Pi and switch it on"


def require_writable(path: Path) -> None:
    """Raise ConfigError if the path is read-only."""
    if not os.access(path, os.W_OK):
        raise ConfigError(
            f"{text(path)}: is read-only (a card's lock switch?)", consequence="nothing was written"
        )
