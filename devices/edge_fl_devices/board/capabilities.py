"""Measure what a device can do: machine, memory, disk, runtimes, amount of data.

The tier follows from the measurement: a device is full if torch can be imported and memory and speed suffice for a backward pass, otherwise
head-only. Its owner may limit it to head-only but not raise it. Nothing heavy is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from edge_fl import __version__
from edge_fl.config import MAX_CLASSES
from edge_fl.fields import Tier
from edge_fl.process_limits import total_memory_mb
from edge_fl.wire.messages import Capability

FULL_MIN_MEMORY_MB = 900
"""A torch process needs about 220 MB before it has a model, and the training step of a small network as much again."""
FULL_MIN_GFLOPS = 4.0
"""About half the speed of one Raspberry Pi 4 core; a slower device misses the deadline of a round even with a small network."""


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
    """Measure this machine. `limit` is the highest tier its owner allows; `gflops` and `torch_s` are benchmark results, if any."""
    memory, torch = total_memory_mb(), _is_importable("torch")
    chosen, why = choose_tier(memory, torch=torch, starts=torch_s > 0, limit=limit, gflops=gflops)
    return Capability(
        tier=chosen.value,
        machine=platform.machine(),
        python=platform.python_version(),
        onnxruntime=onnxruntime or version("onnxruntime"),
        max_opset=max_opset,
        memory_mb=memory,
        disk_free_mb=free_disk_mb(folder),
        samples=sum(samples_per_class),
        samples_per_class=list(samples_per_class[:MAX_CLASSES]),
        head=head,
        agent=__version__,
        notes=[why],
    )


def choose_tier(
    memory_mb: int,
    *,
    torch: bool,
    starts: bool = True,
    limit: Tier | None = None,
    gflops: float = math.inf,
) -> tuple[Tier, str]:
    """Choose the tier from memory, torch and speed, and explain the choice. `starts` says whether torch could be started."""
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


def free_disk_mb(folder: Path) -> int:
    """Free space in MB at `folder`, or at its nearest existing parent."""
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    return shutil.disk_usage(existing).free >> 20


def _is_importable(module: str) -> bool:
    """Does not import the module: torch takes seconds and 200 MB."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version(package: str) -> str:
    """Version of an installed package without importing it; empty if not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
