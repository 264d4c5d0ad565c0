"""`python -m edge_fl`: the command `edge-fl`, where the script itself is not on the path."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys


class Leave:
    """Ends the process with `code` once all else has ended; without a code the interpreter ends as usual.

    Freeing what libraries such as torch have made takes one to three seconds, and the system frees it anyway.
    """

    code: int | None = None

    def __call__(self) -> None:
        """Write what is buffered, and leave. If it cannot be written, the interpreter says so as usual."""
        if self.code is not None:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                try:
                    stream.flush()
                except (OSError, ValueError):
                    return
            os._exit(self.code)


def main() -> int:
    """Run the command and return its exit code. Ctrl-C while modules load also gives one line, and none while the interpreter ends."""
    leave = Leave()
    atexit.register(leave)  # the first that is registered runs last, and after all threads but daemons
    leave.code = _run()
    return leave.code


def _run() -> int:
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
