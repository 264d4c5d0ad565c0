"""Replace this process by another program that ends when its parent does, with the maximum of open files.

Run as a script, ``child.py PARENT PROGRAM ARGUMENT...``: code between fork and exec would not be safe in a parent with threads.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Replace this process by `command`. On Linux the kernel terminates it when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before prctl
        sys.exit(f"{command[0]}: parent process {parent} has ended")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
