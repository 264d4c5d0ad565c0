"""A child that says which process it is: `python -m tests.devices.who`."""

from __future__ import annotations

import os
import sys

from devices import child

if __name__ == "__main__":
    sys.exit(child.serve("who", lambda request: b"%d %s" % (os.getpid(), request)))
