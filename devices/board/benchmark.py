"""The self-benchmark: how fast this board computes, in a second or two and hardly more than 20; it decides the tier, once per set-up.

Run in the child that also counts the data, on one thread; processor seconds are counted, so that a busy neighbour does not lower a tier.
Where training is asked for torch is started too, because a package that is there need not run. The result is kept in
FOLDER/benchmark.json under what it depends on; the way to the broker (`reach_ms`) is not the board's, and measured at every start.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from devices.storage.slots import Installed
from edge_fl import heads
from edge_fl.capability import version
from edge_fl.files import atomic
from edge_fl.wire.endpoint import Endpoint

LIMIT_S, REACH_S = 20.0, 1.0
FILE = "benchmark.json"
SIDE = 384
IMAGES = 8
Features = Callable[[Installed, int], None]
"""Computes the features of so many images through an installed extractor."""
Steps = dict[str, Callable[[], float]]
"""What measures each field of a Speed."""


class Speed(Struct, frozen=True):
    """Processor milliseconds per head fit (MLP, 200 features of 128) and per image through the installed extractor, and seconds until
    torch is there. 0: not measured, or no torch.
    """

    gflops: float = 0.0
    head_ms: float = 0.0
    image_ms: float = 0.0
    torch_s: float = 0.0

    def __str__(self) -> str:
        image = f", {self.image_ms:.1f} ms an image" if self.image_ms else ""
        torch = f", torch in {self.torch_s:.1f} s" if self.torch_s else ""
        return f"measured: {self.gflops:.0f} GFLOP/s, {self.head_ms:.0f} ms a head{image}{torch}"


class StoredSpeed(Struct, frozen=True):
    """A speed, and the set-up that it was measured on."""

    setup: str
    speed: Speed


def speed(
    folder: Path, setup: str, installed: Installed | None, features: Features, *, training: bool = False
) -> Speed:
    """What was measured on this set-up before, or is now; torch only for `training`."""
    extractor = installed.manifest.extractor.sha256 if installed else ""
    setup = f"{setup} {extractor} {version('torch') if training else ''}"
    with suppress(OSError, msgspec.DecodeError):
        kept = msgspec.json.decode((folder / FILE).read_bytes(), type=StoredSpeed)
        if kept.setup == setup:
            return kept.speed
    found = measure(steps(installed, features, training=training))
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / FILE, msgspec.json.encode(StoredSpeed(setup, found)))
    return found


def measure(steps: Steps, clock: Callable[[], float] = time.monotonic) -> Speed:
    """Measures, in this order; what would begin after LIMIT_S is left out."""
    ends_s, found = clock() + LIMIT_S, dict[str, float]()
    for name, step in steps.items():
        if found and clock() >= ends_s:
            break
        found[name] = step()
    return Speed(**found)


def steps(installed: Installed | None, features: Features, *, training: bool) -> Steps:
    """What there is to measure, the cheapest first."""
    found: Steps = {"gflops": _gflops, "head_ms": _head_ms}
    if installed:
        found["image_ms"] = lambda: 1000 * _taken(lambda: features(installed, IMAGES)) / IMAGES
    if training and version("torch"):
        found["torch_s"] = _torch_s
    return found


def reach_ms(endpoint: Endpoint) -> float:
    """Milliseconds until the broker has taken a connection, which is one round trip; 0 if it does not within a second."""
    began_s = time.monotonic()
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=REACH_S).close()
    except OSError:
        return 0.0
    return 1000 * (time.monotonic() - began_s)


def _gflops() -> float:
    matrix = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    return 2e-9 * SIDE**3 / max(min(_taken(lambda: matrix @ matrix) for _ in range(4)), 1e-6)


def _head_ms() -> float:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(200, 128)).astype(np.float32), np.arange(200) % 10
    return 1000 * _taken(lambda: heads.fit("mlp", z, y, 10, unit_norm=False))


def _torch_s(command: str = "import torch") -> float:
    """Wall time, as the disk is what it waits for; a board that is slow has torch all the same, one where it fails has not."""
    began_s = time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", command], capture_output=True, check=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return LIMIT_S
    except (OSError, subprocess.CalledProcessError):
        return 0.0
    return time.monotonic() - began_s


def _taken(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    before = time.thread_time()
    work()
    return time.thread_time() - before
