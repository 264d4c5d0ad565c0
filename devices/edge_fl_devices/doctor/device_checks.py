"""Checks on the device itself: machine, wheels, disk and memory, clock, data, extractor and head."""

from __future__ import annotations

import platform
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from edge_fl.errors import EdgeFLError, InputError
from edge_fl.process_limits import total_memory_mb
from edge_fl.wire import identity
from edge_fl_devices.board import capabilities, imports
from edge_fl_devices.child import feature_children
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.features.child_loader import ChildFeatureLoader
from edge_fl_devices.install import canary
from edge_fl_devices.install.trust import last_seen
from edge_fl_devices.serving.served_model import serving
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store

WHEELS = tuple(
    "numpy onnxruntime sklearn scipy paho.mqtt.client msgspec safetensors tuf cryptography PIL installer packaging".split()
)
MACHINES = ("aarch64", "arm64", "x86_64", "AMD64")
SET_CLOCK = "set the clock: sudo timedatectl set-ntp true, and wait for time-sync.target"


@dataclass(frozen=True)
class DeviceCheck:
    """One checked item, its state, what was found, and, unless the state is ok, what to do about it."""

    check: str
    state: Literal["ok", "warning", "failed", "skipped"]
    found: str
    remedy: str = ""


def result(check: str, passed: bool, found: str, remedy: str) -> DeviceCheck:
    """Return "ok" or "failed"."""
    return DeviceCheck(check, "ok", found) if passed else DeviceCheck(check, "failed", found, remedy)


def graded(check: str, value: int, least: int, enough: int, found: str, remedy: str) -> DeviceCheck:
    """Return "ok" from `enough` on, "failed" below `least`, and "warning" in between."""
    if value >= enough:
        return DeviceCheck(check, "ok", found)
    return DeviceCheck(check, "failed" if value < least else "warning", found, remedy)


def machine(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """Check architecture, word size and Python version."""
    bits, architecture = 8 * struct.calcsize("P"), platform.machine()
    yield result(
        "architecture",
        architecture in MACHINES and bits == 64,
        f"{architecture}, {bits} bit",
        "onnxruntime has wheels for 64-bit systems only: install the 64-bit Raspberry Pi OS",
    )
    yield result(
        "python",
        (3, 11) <= sys.version_info[:2] <= (3, 13),
        platform.python_version(),
        "edge-fl needs Python 3.11 to 3.13: use Raspberry Pi OS Bookworm or Trixie",
    )


def wheels(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """Import all required packages, in a child process, so that this one stays small."""
    broken = imports.failures(WHEELS)
    yield result(
        "wheels",
        not broken,
        "; ".join(broken) or f"all {len(WHEELS)} load",
        "install them again: pip install --force-reinstall edge-fl; one that ends with SIGILL needs an instruction that this"
        " processor lacks: install a version built for it; SIGSEGV or SIGBUS: a bad card or bad memory",
    )


def room(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """Check free disk space and total memory."""
    disk, memory = capabilities.free_disk_mb(Path(config.folder)), total_memory_mb()
    yield graded("disk", disk, 64, 512, f"{disk} MB free", "free some space: a release needs twice its size")
    remedy = "a head fit needs up to 200 MB: use heads nearest or mlp, or more memory"
    yield graded("memory", memory, 256, 400, f"{memory} MB", remedy)


def clock(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """Compare the clock with the last date seen on the device and with the validity of its certificate."""
    now, seen = datetime.now(UTC), last_seen(Path(config.folder) / "tuf")
    behind = f", but {seen:%Y-%m-%d} was seen already" if now < seen else ""
    yield result("clock", now >= seen, f"{now:%Y-%m-%d %H:%M} UTC{behind}", SET_CLOCK)
    if who := identity.certificate_in(config.broker.identity):
        remedy = f"{SET_CLOCK}; if the clock is right: edge-fl fleet rotate {config.id}"
        if who.device != config.id:
            remedy = f"this identity is not that of {config.id}: enrol it"
        yield result(
            "certificate",
            who.begins <= now <= who.expires and who.device == config.id,
            f"of {who.device}, valid from {who.begins:%Y-%m-%d} to {who.expires:%Y-%m-%d}",
            remedy,
        )


def data(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """Measure the board's speed and count the data."""
    current = CurrentData(config)
    try:
        inspection = ChildFeatureLoader(config, feature_children(), current).inspect(current.found())
    except (EdgeFLError, MemoryError) as error:
        yield DeviceCheck("data", "failed", str(error), "see docs/troubleshooting.md")
        return
    report = inspection.report
    if report is None:
        remedy = "one folder per class with files of samples in it, an .npz with x and y, or a CSV file with a column of classes"
        yield DeviceCheck("data", "failed", inspection.trouble, remedy)
        return
    yield DeviceCheck("speed", "ok", str(inspection.speed).removeprefix("measured: "))
    yield DeviceCheck("data", "ok", f"{report.samples} {report.about.samples}: {report.per_class}"[:400])
    for note in report.owner_notes:
        yield DeviceCheck("data", "warning", note, "see docs/devices.md, sections Data and Pictures")


def model(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """Run the canary of the installed extractor and look for the served head."""
    store, slots = Store(Path(config.folder)), Slots(Path(config.folder) / "release")
    installed = slots.current()
    if installed is None:
        yield DeviceCheck("extractor", "skipped", "no release is installed yet")
        return
    tested = canary.check(installed.extractor, installed.manifest)
    yield result(
        "extractor",
        tested.ok,
        f"release {installed.manifest.release}: {tested.reason}, {tested.seconds:.1f} s",
        "the file or this onnxruntime is damaged: restart the agent, which fetches the release again",
    )
    if served := serving(store, slots):
        yield DeviceCheck("head", "ok", f"{served.stored.head.kind}, serves release {served.stored.release}")
    else:
        yield DeviceCheck(
            "head", "warning", "none fitted yet", "wait for the agent, or check edge-fl device status"
        )


def is_running(config: DeviceConfig) -> bool:
    """Whether an agent holds the lock on the device's folder."""
    if not Path(config.folder).is_dir():
        return False
    try:
        with Store(Path(config.folder)).owned():
            return False
    except InputError:
        return True
