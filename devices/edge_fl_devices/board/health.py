"""Board health: throttling, a low battery, low memory; a problem holds a full device to head-only.

The device becomes head-only at once, with the reason in its status, and full again after CALM_S without a problem, so that a board at
the limit does not switch back and forth. Only `read` does I/O.
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
"""Bits of a Raspberry Pi's get_throttled for the present; bits from 16 on are history."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Sensor values; None where this machine provides none."""

    throttled: int | None = None
    battery_percent: int | None = None
    discharging: bool = False
    available_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Why the device is held to head-only ("": it is not), and the monotonic time of the last reading with a problem."""

    why: str = ""
    last_problem_s: float = 0.0


def problem(readings: Readings, *, out_of_memory: bool = False) -> str:
    """Describe what is wrong in a few words; "" if nothing is."""
    if out_of_memory:
        return "out of memory"
    if now := [name for bit, name in THROTTLED.items() if (readings.throttled or 0) >> bit & 1]:
        return ", ".join(now)
    battery, memory = readings.battery_percent, readings.available_mb
    if readings.discharging and battery is not None and battery < LOW_BATTERY_PERCENT:
        return f"battery at {battery} %"
    if memory is not None and memory < LOW_MEMORY_MB:
        return f"{memory} MB of memory left"
    return ""


def update(health: Health, problem: str, now_s: float) -> Health:
    """Hold the device at the first problem, release it after CALM_S without any; the first reason stays until then."""
    if problem:
        return Health(health.why or problem, now_s)
    if health.why and now_s - health.last_problem_s >= CALM_S:
        return replace(health, why="")
    return health


def read(root: Path = Path("/")) -> Readings:
    """Read this machine's sensors; `root` is the parent of /sys and /proc."""
    battery, discharging = _battery(root / "sys/class/power_supply")
    return Readings(_throttled(root), battery, discharging, _available_mb(root / "proc/meminfo"))


def _throttled(root: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int((root / "sys/devices/platform/soc/soc:firmware/get_throttled").read_text().strip(), 16)
    if vcgencmd := shutil.which("vcgencmd"):
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            done = subprocess.run(
                [vcgencmd, "get_throttled"], capture_output=True, text=True, timeout=VCGENCMD_S, check=True
            )
            return int(done.stdout.strip().partition("=")[2], 16)
    return None


def _battery(folder: Path) -> tuple[int | None, bool]:
    """Return the lowest battery level in percent, and whether any battery discharges."""
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
