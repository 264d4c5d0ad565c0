"""The memory of this machine."""

import os
from pathlib import Path


def total_memory_mb() -> int:
    """Physical memory in MB, or the cgroup's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = physical
    return min(physical, limit) >> 20
