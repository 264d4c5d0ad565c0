"""Check that a boot partition belongs to a supported Raspberry Pi OS, by its file names and `issue.txt`."""

import re
from collections.abc import Callable, Collection
from datetime import date

from edge_fl.errors import ConfigError
from edge_fl_devices.flash.wheels import PYTHONS

BOOKWORM, TRIXIE = date(2023, 10, 10), date(2025, 10, 1)  # dates of the first images
USER_DATA = "user-data"  # of cloud-init, which Trixie has
REQUIRED = ("config.txt", "cmdline.txt", "issue.txt")
# a 64-bit image has only kernel8.img and kernel_2712.img
ONLY_32_BIT = ("kernel.img", "kernel7.img", "kernel7l.img")


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
