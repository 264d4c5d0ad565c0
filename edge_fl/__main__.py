"""`python -m edge_fl`: the command `edge-fl`, where the script itself is not on the path."""

from __future__ import annotations

import io
import os
import signal
import sys


def main() -> int:
    """Run the command and return its exit code. Ctrl-C while modules load also gives one line, and none while the interpreter ends."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:  # Python may lose an exception while it loads a module; until `interrupting`, Ctrl-C ends the process at once
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in ("stdout", "stderr"):
        if (
            getattr(sys, name) is None
        ):  # closed by the shell (>&-): its descriptor must not become another file's
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # nothing that is printed ends a command
    from edge_fl.signals import interrupting, stop_of

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with interrupting():
            from edge_fl.cli import main as run

            return run()
    except KeyboardInterrupt as error:
        words, code = stop_of(error)
        sys.stderr.write(f"edge-fl: {words}\n")
        return code
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
