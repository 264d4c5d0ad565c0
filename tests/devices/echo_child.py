"""A child process that responds with its process id and the request, or fails to import: `python -m tests.devices.echo_child`."""

from __future__ import annotations

import os
import sys

from edge_fl_devices import child


def respond(request: bytes) -> bytes:
    if request.startswith(b"import: "):
        raise ImportError(request.decode())
    return b"%d %s" % (os.getpid(), request)


if __name__ == "__main__":
    sys.exit(child.serve("who", respond))
