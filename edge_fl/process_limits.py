"""Limits of processes: those that a child sets for itself before it runs what others made, open files, and memory."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import time
from contextlib import suppress
from pathlib import Path

from edge_fl.errors import InputError

SPARE = 64  # other than sockets: libraries, logs, children
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
BLOCK = 64 * 1024


def limit_child(memory_bytes: int, cpu_s: int) -> None:
    """Limit a child's address space and processor time beyond what it has used by now; forbid core dumps and writing to files.

    SIGXCPU ends a process that used its time, so that SIGKILL means that the system is out of memory.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space_bytes = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    most_s = math.ceil(time.process_time()) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))


def require_sockets(sockets: int, who: str) -> None:
    """Raise the soft limit on open files so that `sockets` more can be opened. Raises InputError if the hard limit is lower."""
    needed = sockets + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"{who}: {needed} open files and sockets, but this process may have {hard};"
            f" expected a higher limit (ulimit -Hn, LimitNOFILE=)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def raise_open_files() -> None:
    """Raise the soft limit on open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def total_memory_mb() -> int:
    """Physical memory in MB, or the cgroup's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = physical
    return min(physical, limit) >> 20


def return_freed_blocks() -> None:
    """Let malloc return freed blocks above 64 KiB to the system at once, and threads share a heap; call it before the extractor is loaded.

    Loading EfficientNet-Lite0 peaks 13 MB lower, and a service with several threads 1 MB. Without effect where malloc is not glibc's.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, BLOCK)
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, BLOCK)
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
