"""What the doctor looks at on the device itself: machine, wheels, room, clock, data, extractor and head."""

from __future__ import annotations

import platform
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from devices.child import feature_children
from devices.config import DeviceConfig
from devices.doctor.check_result import Finding, finding, graded
from devices.features.child_loader import ChildFeatureLoader
from devices.install import canary
from devices.serving.served_model import serving
from devices.storage.slots import Slots
from devices.storage.store import Store
from edge_fl import capability
from edge_fl.errors import InputError
from edge_fl.wire import identity

WHEELS = (
    "numpy",
    "onnxruntime",
    "sklearn",
    "scipy",
    "paho.mqtt.client",
    "msgspec",
    "safetensors",
    "tuf",
    "cryptography",
    "PIL",
)
MACHINES = ("aarch64", "arm64", "x86_64", "AMD64")
LOAD_S = 120.0
LOADING = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(name, type(error).__name__, error)
"""


def machine(config: DeviceConfig) -> Iterator[Finding]:
    """Architecture, word size and Python."""
    bits, found = 8 * struct.calcsize("P"), platform.machine()
    yield finding(
        "architecture",
        found in MACHINES and bits == 64,
        f"{found}, {bits} bit",
        "onnxruntime has wheels for 64-bit systems only: install the 64-bit Raspberry Pi OS",
    )
    version = sys.version_info[:2]
    yield finding(
        "python",
        (3, 11) <= version <= (3, 13),
        platform.python_version(),
        "edge-fl needs Python 3.11 to 3.13: use Raspberry Pi OS Bookworm or Trixie",
    )


def wheels(config: DeviceConfig) -> Iterator[Finding]:
    """Whether everything that is needed can be imported, in a child, so that it does not stay here."""
    found = subprocess.run(
        [sys.executable, "-c", LOADING, *WHEELS], capture_output=True, text=True, timeout=LOAD_S, check=False
    )
    broken = found.stdout.strip().splitlines()
    if found.returncode:
        broken.append(f"the child ended with code {found.returncode}")
    yield finding(
        "wheels",
        not broken,
        "; ".join(broken) or f"all {len(WHEELS)} load",
        "install them again: pip install --force-reinstall edge-fl (a crash at import: wrong architecture or a bad card)",
    )


def room(config: DeviceConfig) -> Iterator[Finding]:
    """Disk and memory."""
    disk = capability.free_disk_mb(Path(config.folder))
    yield graded("disk", disk, 64, 512, f"{disk} MB free", "free some space: a release needs twice its size")
    memory = capability.total_memory_mb()
    yield graded(
        "memory",
        memory,
        256,
        400,
        f"{memory} MB",
        "a head fit takes 200 MB at its peak: use heads nearest or mlp, or more memory",
    )


def clock(config: DeviceConfig) -> Iterator[Finding]:
    """The clock against what the device has already seen, and against the life of its certificate."""
    now, remedy = (
        datetime.now(UTC),
        "set the clock: sudo timedatectl set-ntp true, and wait for time-sync.target",
    )
    seen = datetime.fromtimestamp(0, UTC)
    with suppress(OSError, ValueError):
        seen = datetime.fromisoformat((Path(config.folder) / "tuf" / "last_seen.txt").read_text()).astimezone(
            UTC
        )
    yield finding(
        "clock",
        now >= seen,
        f"{now:%Y-%m-%d %H:%M} UTC" + (f", but {seen:%Y-%m-%d} was seen already" if now < seen else ""),
        remedy,
    )
    if config.broker.identity:
        who = identity.read(Path(config.broker.identity))
        yield finding(
            "certificate",
            who.begins <= now <= who.expires and who.device == config.id,
            f"of {who.device}, good from {who.begins:%Y-%m-%d} to {who.expires:%Y-%m-%d}",
            f"{remedy}; if the clock is right: edge-fl fleet rotate {config.id}"
            if who.device == config.id
            else f"this identity is not that of {config.id}: enrol it",
        )


def data(config: DeviceConfig) -> Iterator[Finding]:
    """The self-benchmark, and the data source, counted."""
    found = ChildFeatureLoader(config, feature_children()).inspect()
    if found.report is None:
        yield Finding(
            "data",
            "failed",
            found.trouble,
            "one folder per class with pictures in it, or an .npz with x and y",
        )
        return
    yield Finding("speed", "ok", str(found.speed).removeprefix("measured: "))
    counts = ", ".join(
        f"{name} {count}"
        for name, count in zip(found.report.classes, found.report.samples_per_class, strict=True)
    )
    yield Finding("data", "ok", f"{found.report.samples} images: {counts}"[:400])
    for note in found.report.notes:
        yield Finding("data", "warning", note, "see docs/devices.md, section data")


def model(config: DeviceConfig) -> Iterator[Finding]:
    """The installed extractor against the sample that its signed manifest holds, and the head that serves."""
    store, slots = Store(Path(config.folder)), Slots(Path(config.folder) / "release")
    installed = slots.current()
    if installed is None:
        yield Finding("extractor", "skipped", "no release is installed yet", "")
        return
    verdict = canary.check(installed.extractor, installed.manifest)
    yield finding(
        "extractor",
        verdict.ok,
        f"release {installed.manifest.release}: {verdict.why}, {verdict.seconds:.1f} s",
        "the file or this onnxruntime is not sound: restart the agent, which fetches the release again",
    )
    pair = serving(store, slots)
    if pair:
        yield Finding("head", "ok", f"{pair.stored.head.kind}, serves release {pair.stored.release}")
    else:
        yield Finding("head", "warning", "none fitted yet", "wait for the agent, or look at its status")


def is_running(config: DeviceConfig) -> bool:
    """Whether an agent has the device's folder."""
    if not Path(config.folder).is_dir():
        return False
    try:
        with Store(Path(config.folder)).owned():
            return False
    except InputError:
        return True
