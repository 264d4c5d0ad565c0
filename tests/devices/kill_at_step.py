"""Run the command `edge-fl` and kill it before a step: `python -m tests.devices.kill_at_step FOLDER STEP COMMAND...`.

A step is a change of the disk, as "rename heads/*", "remove outbox/rel-2.json" or "change release/chunks/*:3" (the third of its kind),
with paths relative to FOLDER. With STEP "-" nothing is killed, and the steps are printed on stderr. Children are not killed.
"""

import os
import signal
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

EVENTS = {"os.rename": ("rename", 1), "os.remove": ("remove", 0), "open": ("create", 0)}


def watch(folder: Path, step: str) -> None:
    pattern, _, number = step.partition(":")
    seen: Counter[str] = Counter()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS:
            return
        verb, index = EVENTS[event]
        path = arguments[index]
        if verb == "create":
            flags = arguments[2]  # of open(2), for Python's own open too
            if not flags & (os.O_WRONLY | os.O_RDWR):
                return
            verb = "create" if flags & (os.O_TRUNC | os.O_EXCL | os.O_APPEND) else "change"
        if not isinstance(path, str | os.PathLike) or not Path(path).is_relative_to(folder):
            return
        name = f"{verb} {Path(path).relative_to(folder)}"
        if step == "-":
            os.write(2, f"STEP {name}\n".encode())
        elif fnmatch(name, pattern):
            seen[pattern] += 1
            if seen[pattern] == int(number or 1):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    watch(Path(sys.argv[1]), sys.argv[2])
    from edge_fl.cli import main

    sys.exit(main(sys.argv[3:]))
