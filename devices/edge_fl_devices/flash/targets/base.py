"""Interface of the targets to which a bundle can be written, and the check of a boot partition."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from datetime import date
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl_devices.flash.bundle import File
from edge_fl_devices.flash.wheels import PYTHONS

BOOKWORM, TRIXIE = date(2023, 10, 10), date(2025, 10, 1)  # dates of the first images
USER_DATA = "user-data"  # of cloud-init, which Trixie has
REQUIRED = ("config.txt", "cmdline.txt", "issue.txt")
# a 64-bit image has only kernel8.img and kernel_2712.img
ONLY_32_BIT = ("kernel.img", "kernel7.img", "kernel7l.img")


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


def supported_pythons(
    names: Collection[str], read: Callable[[str], bytes | None], where: str
) -> tuple[str, ...]:
    """Return the Python versions that the partition's system may have. Raises ConfigError for an unsupported system."""
    if missing := [name for name in REQUIRED if name not in names]:
        raise ConfigError(
            f"{where}: not a Raspberry Pi OS boot partition ({', '.join(missing)} missing); "
            "expected a card or an image written by Raspberry Pi Imager"
        )
    if only := [name for name in ONLY_32_BIT if name in names]:
        raise ConfigError(
            f"{where}: 32-bit Raspberry Pi OS ({only[0]}); expected the 64-bit one, because onnxruntime has no 32-bit wheel",
            consequence="nothing was written",
        )
    issued = _date((read("issue.txt") or b"").decode("utf-8", "replace"))
    if issued is None or issued < BOOKWORM:
        raise ConfigError(
            f"{where}: Raspberry Pi OS of {issued or 'an unknown date'}; expected Bookworm or Trixie (from {BOOKWORM})",
            consequence="nothing was written",
        )
    if USER_DATA in names:
        return (PYTHONS["trixie"],)
    if issued < TRIXIE:
        return (PYTHONS["bookworm"],)
    return tuple(PYTHONS.values())  # later "legacy" images are still Bookworm


def _date(issue: str) -> date | None:
    match = re.search(r"\b\d{4}-\d{2}-\d{2}\b", issue)
    try:
        return date.fromisoformat(match[0]) if match else None
    except ValueError:
        return None
