"""The processes of a run: a folder with data, a free port, and the real commands as child processes."""

import re
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from edge_fl.errors import DeadlineError
from edge_fl_server.children import CommandProcess, CommandProcesses

IMAGES_PER_DEVICE = 20
VARIABLES = {"OMP_NUM_THREADS": "1"}


class RecordedChildren(CommandProcesses):
    """Child processes whose output lines are kept."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, list[str]] = defaultdict(list)
        super().__init__(lambda name, line: self._lines[name].append(line), VARIABLES)

    def has_printed(self, name: str, text: str) -> bool:
        """Whether one of a child's lines contains the text."""
        return any(text in line for line in tuple(self._lines[name]))

    def connected(self) -> int:
        """Number of connected devices in the fleet's last line."""
        match = re.match(r"(\d+)/\d+ connected", (self._lines["fleet"] or [""])[-1])
        return int(match[1]) if match else 0


@contextmanager
def stage(devices: int) -> Iterator[tuple[Path, int, RecordedChildren]]:
    """Create a folder with data for a number of devices, and choose a free port."""
    with tempfile.TemporaryDirectory(prefix="edge-fl-scale-") as name, RecordedChildren() as children:
        folder, rng = Path(name), np.random.default_rng(0)
        y = rng.integers(0, 10, devices * IMAGES_PER_DEVICE)
        x = 20 * y[:, None, None, None] + rng.integers(0, 40, (len(y), 1, 8, 8))
        np.savez(folder / "scale.npz", x=x.astype("uint8"), y=y)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        yield folder, port, children


def start_broker(children: CommandProcesses, folder: Path, port: int) -> CommandProcess:
    """Start a broker and wait until it accepts connections."""
    broker = children.start(
        "broker", "broker", "up", "--insecure", "--port", str(port), "--dir", str(folder / "broker")
    )
    wait_until(partial(_answers, port), broker, 60.0)
    return broker


def fleet_of(folder: Path, port: int, devices: int) -> list[str]:
    """The command that runs a fleet on that data."""
    data = [
        "--dataset",
        "scale",
        "--data-dir",
        str(folder),
        "--set",
        "data.partition=iid",
        "--heads",
        "logistic",
    ]
    places = ["--port", str(port), "--dir", str(folder / "fleet")]
    return ["fleet", "up", "--devices", str(devices), *places, *data]


def wait_until(claim: Callable[[], bool], child: CommandProcess, deadline_s: float) -> None:
    """Wait until `claim` holds. Raises RunError if the child ends first, DeadlineError."""
    until_s = time.monotonic() + deadline_s
    while not claim():
        if child.code is not None:
            raise child.failure()
        if time.monotonic() > until_s:
            raise DeadlineError(f"{child.name}: not ready after {deadline_s:g} s: {child.last_line}")
        time.sleep(0.1)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0
