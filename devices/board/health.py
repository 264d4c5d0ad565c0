"""How the board is: throttled, on a battery that runs out, or out of memory; and what that means for its tier.

A full device that is not well becomes head-only at once, with the reason in its status, and full again after it has been well for a while:
a board on the edge does not flap. Reading is at the rim (`read`), judging is pure.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

CALM_S = 600.0
LOW_BATTERY_PERCENT = 20
LOW_MEMORY_MB = 64
VCGENCMD_S = 2.0
THROTTLED = {0: "under-voltage", 1: "frequency capped", 2: "throttled", 3: "too hot"}
"""Bits of a Raspberry Pi's get_throttled that are about now; those from 16 on are about the past."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What was read; None where this machine does not say."""

    throttled: int | None = None
    battery_percent: int | None = None
    discharging: bool = False
    available_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """`why` the device is held to head-only, "" if it is not; `well_since_s` is when the last reading was bad, on a forward clock."""

    why: str = ""
    well_since_s: float = 0.0


def judge(found: Readings, *, out_of_memory: bool = False) -> str:
    """What is wrong, in a few words; "" if nothing is."""
    if out_of_memory:
        return "out of memory"
    if found.throttled:
        now = [name for bit, name in THROTTLED.items() if found.throttled >> bit & 1]
        if now:
            return ", ".join(now)
    if (
        found.discharging
        and found.battery_percent is not None
        and found.battery_percent < LOW_BATTERY_PERCENT
    ):
        return f"battery at {found.battery_percent} %"
    if found.available_mb is not None and found.available_mb < LOW_MEMORY_MB:
        return f"{found.available_mb} MB of memory left"
    return ""


def follow(health: Health, wrong: str, now_s: float) -> Health:
    """Bad at once, well again only after CALM_S without anything wrong; the first reason stays until then."""
    if wrong:
        return Health(health.why or wrong, now_s)
    if health.why and now_s - health.well_since_s >= CALM_S:
        return replace(health, why="")
    return health


def read(root: Path = Path("/")) -> Readings:
    """What this machine says of itself; `root` is where /sys and /proc are."""
    battery, discharging = _battery(root / "sys/class/power_supply")
    return Readings(_throttled(root), battery, discharging, _available_mb(root / "proc/meminfo"))


def _throttled(root: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int((root / "sys/devices/platform/soc/soc:firmware/get_throttled").read_text().strip(), 16)
    if vcgencmd := shutil.which("vcgencmd"):
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            said = subprocess.run(
                [vcgencmd, "get_throttled"], capture_output=True, text=True, timeout=VCGENCMD_S, check=True
            )
            return int(said.stdout.strip().partition("=")[2], 16)
    return None


def _battery(folder: Path) -> tuple[int | None, bool]:
    """The emptiest battery in percent, and whether one discharges."""
    levels, discharging = list[int](), False
    for supply in sorted(folder.glob("*")):
        with suppress(OSError, ValueError):
            if (supply / "type").read_text().strip() == "Battery":
                levels.append(int((supply / "capacity").read_text()))
                discharging |= (supply / "status").read_text().strip() == "Discharging"
    return min(levels, default=None), discharging


def _available_mb(meminfo: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    return None
