"""A child process that responds with its process id and the request: `python -m tests.devices.echo_child`."""

from __future__ import annotations

import os
import sys

from edge_fl_devices import child

if __name__ == "__main__":
    sys.exit(child.serve("who", lambda request: b"%d %s" % (os.getpid(), request)))
