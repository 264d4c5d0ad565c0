"""A child process that responds with its process id and the request, or does what it says: `python -m tests.devices.echo_child`."""

import os
import signal
import sys
import time

from edge_fl.errors import RunError
from edge_fl_devices import child


def respond(request: bytes) -> bytes:
    if request.startswith(b"import: "):
        raise ImportError(request.decode())
    match request.split():
        case [b"signal", name]:
            os.kill(os.getpid(), getattr(signal, name.decode()))
        case [b"exit", words]:
            os.write(2, words + b"\n")
            os._exit(3)
        case [b"diverge"]:
            raise RunError("the loss is NaN")
        case [b"count", number, pause_s]:
            for done in range(1, int(number) + 1):
                child.progress(done, int(number))
                time.sleep(float(pause_s))
        case [b"print"]:
            sys.stdout.write("a library's greeting")
            sys.stdout.flush()
            os.write(2, b"x" * 200_000)
        case [b"large", number]:
            return request.ljust(int(number))
    return b"%d %s" % (os.getpid(), request)


if __name__ == "__main__":
    sys.exit(child.serve("who", respond))
