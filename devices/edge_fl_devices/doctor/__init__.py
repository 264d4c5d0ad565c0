"""Check a device for problems, each with a remedy: `edge-fl device doctor`.

A check is a function of the device's settings that yields results; to add one, write the function and add a line to CHECKS. Checks
leave nothing changed on the device. While its agent runs, the broker checks are skipped: two clients of one name disconnect each other.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Iterator

from edge_fl.errors import EdgeFLError
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.doctor import account_checks, device_checks
from edge_fl_devices.doctor.device_checks import DeviceCheck
from edge_fl_devices.doctor.network_checks import network

__all__ = ["CHECKS", "DeviceCheck", "run_checks"]

CHECKS: dict[str, Callable[[DeviceConfig], Iterator[DeviceCheck]]] = {
    "machine": device_checks.machine,
    "wheels": device_checks.wheels,
    "room": device_checks.room,
    "clock": device_checks.clock,
    "network": network,
    "accounts": account_checks.accounts,
    "data": device_checks.data,
    "model": device_checks.model,
}


def run_checks(
    config: DeviceConfig,
    show: Callable[[str], None] = lambda line: None,
    only: Collection[str] = tuple(CHECKS),
) -> list[DeviceCheck]:
    """Return the results of the checks in `only`, in the order of CHECKS; a check that raises is a failed result.

    `show` is called with progress lines.
    """
    results: list[DeviceCheck] = []
    for name, check in ((name, check) for name, check in CHECKS.items() if name in only):
        show(f"checking {name}")
        try:
            results += check(config)
        except (EdgeFLError, OSError, MemoryError, subprocess.SubprocessError) as error:
            results.append(
                DeviceCheck(
                    name, "failed", " ".join(str(error).split()), "see docs/devices.md, section doctor"
                )
            )
    return results
