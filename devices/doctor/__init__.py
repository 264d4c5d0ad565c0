"""What may be wrong with a device, looked at one thing after the other, each with what to do about it: `edge-fl device doctor`.

A check is a function of the device's settings that yields findings; a new one is one function and one line in CHECKS. Nothing here
changes the device, and while its agent runs the broker is left alone, because two clients of one name throw each other out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

from devices.config import DeviceConfig
from devices.doctor import device_checks
from devices.doctor.check_result import Finding
from devices.doctor.network_checks import network
from edge_fl.errors import EdgeFLError

__all__ = ["CHECKS", "Finding", "examine"]

CHECKS: dict[str, Callable[[DeviceConfig], Iterator[Finding]]] = {
    "machine": device_checks.machine,
    "wheels": device_checks.wheels,
    "room": device_checks.room,
    "clock": device_checks.clock,
    "network": network,
    "data": device_checks.data,
    "model": device_checks.model,
}


def examine(config: DeviceConfig, tell: Callable[[str], None] = lambda line: None) -> list[Finding]:
    """All findings, in the order of CHECKS; a check that cannot be made is a finding too."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        tell(f"looking at {name}")
        try:
            findings += check(config)
        except (EdgeFLError, OSError, MemoryError, subprocess.SubprocessError) as error:
            findings.append(
                Finding(name, "failed", " ".join(str(error).split()), "see docs/devices.md, section doctor")
            )
    return findings
