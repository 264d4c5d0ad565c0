"""Becomes another program that ends when its parent does, with as many open files as this user may have.

Run as a script, ``child.py PARENT PROGRAM ARGUMENT...``: a small process of its own instead of code between fork and exec, which is not
safe in a parent with threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Replaces this process by `command`. On Linux the kernel then ends it when the thread that started it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was quicker
        sys.exit(f"{command[0]}: process {parent}, which started it, is gone")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
