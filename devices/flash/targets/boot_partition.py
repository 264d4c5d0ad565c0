"""Whether something is a boot partition of Raspberry Pi OS that an agent can live on, told from the names of its files and `issue.txt`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import date

from devices.flash.first_boot import USER_DATA
from devices.flash.wheels import PYTHONS
from edge_fl.errors import ConfigError

BOOKWORM, TRIXIE = date(2023, 10, 10), date(2025, 10, 1)  # their first images
MARKS = ("config.txt", "cmdline.txt")
# a 64-bit image has kernel8.img and kernel_2712.img alone
ONLY_32_BIT = ("kernel.img", "kernel7.img", "kernel7l.img")


@dataclass(frozen=True)
class Card:
    """`pythons` are those that its system may have; `cloud_init` says who reads the first boot's orders."""

    pythons: tuple[str, ...]
    cloud_init: bool


def recognise(names: Collection[str], read: Callable[[str], bytes | None], where: str) -> Card:
    """What the partition with these files is. Raises ConfigError, with one message for each reason to refuse."""
    if missing := [name for name in (*MARKS, "issue.txt") if name not in names]:
        raise ConfigError(
            f"{where}: not a Raspberry Pi OS boot partition ({', '.join(missing)} missing); "
            "expected a card or an image that Raspberry Pi Imager wrote"
        )
    if only := [name for name in ONLY_32_BIT if name in names]:
        raise ConfigError(
            f"{where}: 32-bit Raspberry Pi OS ({only[0]}); expected the 64-bit one, because onnxruntime has no 32-bit wheel; "
            "nothing was written"
        )
    issued = _date((read("issue.txt") or b"").decode("utf-8", "replace"))
    if issued is None or issued < BOOKWORM:
        raise ConfigError(
            f"{where}: Raspberry Pi OS of {issued or 'an unknown date'}; expected Bookworm or Trixie (from {BOOKWORM}); "
            "nothing was written"
        )
    cloud_init = USER_DATA in names
    if cloud_init:
        return Card((PYTHONS["trixie"],), cloud_init)
    if issued < TRIXIE:
        return Card((PYTHONS["bookworm"],), cloud_init)
    return Card(tuple(PYTHONS.values()), cloud_init)  # "legacy" images go on being Bookworm


def _date(issue: str) -> date | None:
    found = re.search(r"\b(\d{4})-(\d{2})-(\d{2})\b", issue)
    try:
        return date(*map(int, found.groups())) if found else None
    except ValueError:
        return None
