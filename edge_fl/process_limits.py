"""Limits that a child process sets for itself before it runs what others made, such as a model."""

import math
import resource
import time
from pathlib import Path


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Limit address space and processor time beyond what the process has used by now; forbid core dumps and writing to files.

    SIGXCPU ends a process that used its time, so that SIGKILL means that the system is out of memory.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space_bytes = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    most_s = math.ceil(time.process_time()) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
