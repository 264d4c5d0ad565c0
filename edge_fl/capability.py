"""What a device is and can do, measured on the device itself: the machine, its memory and disk, its runtimes, how much data it has.

The tier follows from the measurement: a device is full only if torch can be imported, and there are memory and speed for a backward pass;
everything else is head-only. A person may limit a device to head-only, never lift it. Nothing heavy is imported to find out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import shutil
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from edge_fl import __version__
from edge_fl.wire.messages import Capability

FULL_MIN_MEMORY_MB = 900
"""A torch process holds about 220 MB before it has a model, and a small network's training step as much again."""


FULL_MIN_GFLOPS = 4.0
"""One core of a Raspberry Pi 4 does about twice that; below it a round of a small network takes longer than its deadline."""


class Tier(StrEnum):
    """What a device can do for the fleet: fit a head on a frozen extractor, or train parts of the model."""

    HEAD = "head"
    FULL = "full"


def measure(
    *,
    folder: Path,
    samples_per_class: Sequence[int] = (),
    head: str = "",
    limit: Tier | None = None,
    onnxruntime: str = "",
    max_opset: int = 0,
    gflops: float = math.inf,
    torch_s: float = math.inf,
) -> Capability:
    """The machine as it is now. `limit` is the highest tier its owner allows; `gflops` and `torch_s` are what a benchmark found, if any."""
    memory, torch = total_memory_mb(), _is_importable("torch")
    chosen, why = tier(memory, torch=torch, starts=torch_s > 0, limit=limit, gflops=gflops)
    return Capability(
        tier=chosen.value,
        machine=platform.machine(),
        python=platform.python_version(),
        onnxruntime=onnxruntime or version("onnxruntime"),
        max_opset=max_opset,
        memory_mb=memory,
        disk_free_mb=free_disk_mb(folder),
        samples=sum(samples_per_class),
        samples_per_class=list(samples_per_class),
        head=head,
        agent=__version__,
        notes=[why],
    )


def tier(
    memory_mb: int,
    *,
    torch: bool,
    starts: bool = True,
    limit: Tier | None = None,
    gflops: float = math.inf,
) -> tuple[Tier, str]:
    """The tier of a machine with `memory_mb` of memory, a torch that `starts` and so fast a core, and why, in words for a person."""
    if limit is Tier.HEAD:
        return Tier.HEAD, "head: limited by its owner"
    if not torch:
        return Tier.HEAD, "head: torch is not installed"
    if not starts:
        return Tier.HEAD, "head: torch did not start"
    if memory_mb < FULL_MIN_MEMORY_MB:
        return Tier.HEAD, f"head: {memory_mb} MB of memory, full needs {FULL_MIN_MEMORY_MB}"
    if gflops < FULL_MIN_GFLOPS:
        return Tier.HEAD, f"head: {gflops:.1f} GFLOP/s, full needs {FULL_MIN_GFLOPS:g}"
    return Tier.FULL, f"full: torch and {memory_mb} MB of memory"


def total_memory_mb() -> int:
    """Physical memory in MB, or the control group's limit where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = physical
    return min(physical, limit) >> 20


def free_disk_mb(folder: Path) -> int:
    """Free space in MB where `folder` is, or will be."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    return shutil.disk_usage(there).free >> 20


def _is_importable(module: str) -> bool:
    """Without importing it, which would take seconds and 200 MB."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version(package: str) -> str:
    """Of an installed package, found without importing it; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
