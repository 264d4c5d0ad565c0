"""Which packages do not load on this board, and why: in a child process, because some end it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from edge_fl import signals
from edge_fl.errors import KilledError
from edge_fl_devices.child import KILLS, environment

DEADLINE_S = 120.0
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    print(name, flush=True)
    try:
        importlib.import_module(name)
    except Exception as error:
        print("", type(error).__name__, " ".join(str(error).split()), flush=True)
"""


def failures(names: Sequence[str]) -> list[str]:
    """One line for each package that fails, such as "onnxruntime ends with SIGILL on this processor"; those after it were not tried.

    Raises subprocess.TimeoutExpired.
    """
    command = [sys.executable, "-P", "-c", IMPORT_ALL, *names]
    for _ in range(KILLS):  # an accident is not the package's fault
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(), check=False
        )
        if done.returncode == 0:
            break
    found, name = [], ""
    for line in done.stdout.splitlines():
        if line.startswith(" "):
            found.append(name + line)
        else:
            name = line
    if ended_by := signals.name(done.returncode):
        found.append(f"{name} ends with {ended_by} on this processor")
    elif done.returncode:
        found.append(f"{name}: the child {signals.ending(done.returncode)}")
    return found


@contextmanager
def naming(*names: str) -> Iterator[None]:
    """Add to a KilledError of the block which of these packages ends every process that loads it, if one does."""
    try:
        yield
    except KilledError as error:
        with suppress(OSError, subprocess.SubprocessError):
            if found := failures(names):
                raise KilledError(f"{error.message}: {found[-1]}", error.signal, error.consequence) from error
        raise
