"""Collect a diagnostics bundle: checks, versions, recent errors, and the settings that `edge_fl.wire.egress` lists.

Left out are the checks that read the owner's data or load every package, which takes more memory than a busy board may have.
"""

import platform
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from edge_fl.fleet.settings import flat
from edge_fl.wire.diagnostics import Check, Diagnostics, Setting
from edge_fl.wire.egress import SETTINGS
from edge_fl.wire.messages import LogLevel, Query
from edge_fl_devices.agent.state import AgentState
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.doctor import run_checks
from edge_fl_devices.remote.log_file import LogFile
from edge_fl_devices.storage.slots import Slots

CHECKS = ("machine", "room", "clock", "network")
IDLE_CHECKS = (*CHECKS, "model")  # the canary loads the extractor, as a fit under way does
PACKAGES = tuple(
    "edge-fl numpy onnxruntime scikit-learn scipy paho-mqtt msgspec safetensors tuf cryptography pillow torch".split()
)
ERRORS: LogLevel = "warning"
ERROR_BYTES = 64 * 1024


def collect(config: DeviceConfig, state: AgentState, file: LogFile, running_s: float) -> Diagnostics:
    """Collect everything; takes seconds, because the checks start child processes."""
    checks = run_checks(config, only=CHECKS if state.work else IDLE_CHECKS)
    blocked = Slots(Path(config.folder) / "release").blocked
    return Diagnostics(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        status=state.status,
        activity=state.activity,
        release=state.release,
        why=state.reason,
        capability=state.capability,
        versions=versions(),
        settings=public_settings(config),
        checks=[
            msgspec.convert({key: text[:200] for key, text in asdict(check).items()}, Check)
            for check in checks
        ],
        errors=file.matching(Query("errors", "logs", ERRORS, max_bytes=ERROR_BYTES)).lines,
        blocked={str(release): why[:200] for release, why in blocked.items()},
        uptime_s=_uptime_s(),
        running_s=round(running_s, 1),
    )


def versions() -> dict[str, str]:
    """Versions of the system, Python and the installed packages."""
    found = {"system": platform.platform()[:200], "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def public_settings(config: DeviceConfig) -> dict[str, Setting]:
    """The settings that may leave the device, by their names in its settings file."""
    values = flat(msgspec.to_builtins(config))
    return {name: values[name] for name in SETTINGS if name in values}


def _uptime_s() -> float:
    with suppress(OSError, ValueError, IndexError):
        return float(Path("/proc/uptime").read_text().split()[0])
    return 0.0
