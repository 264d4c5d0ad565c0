"""Measure the board's computing speed, once per set-up, in a few seconds; the result decides the device's tier.

Runs on one thread in the child process that also counts the data. It counts processor seconds, so that other load does not lower the
tier. If training is allowed it also imports torch, because an installed package may fail to load. The result is kept in
FOLDER/benchmark.json with the set-up it belongs to; the round trip to the broker (`reach_ms`) is measured at every start.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct

from edge_fl import heads
from edge_fl.files.shared import make_folder
from edge_fl.wire.endpoint import Endpoint
from edge_fl_devices.board.capabilities import version
from edge_fl_devices.child import KILLS
from edge_fl_devices.storage import read_json, write_json
from edge_fl_devices.storage.slots import InstalledRelease

LIMIT_S, REACH_S = 20.0, 1.0
FILE = "benchmark.json"
SIDE = 384
SAMPLES = 8
Features = Callable[[InstalledRelease, int], None]
"""Computes the features of this many samples with an installed extractor."""
Steps = dict[str, Callable[[], float]]
"""A measurement for each field of `Speed`."""


class Speed(Struct, frozen=True):
    """Matrix GFLOP/s, processor milliseconds per head fit (MLP, 200 x 128 features) and per sample of the installed extractor, and seconds
    to import torch. 0: not measured, or torch does not load.
    """

    gflops: float = 0.0
    head_ms: float = 0.0
    sample_ms: float = 0.0
    torch_s: float = 0.0

    def __str__(self) -> str:
        sample = f", {self.sample_ms:.1f} ms a sample" if self.sample_ms else ""
        torch = f", torch in {self.torch_s:.1f} s" if self.torch_s else ""
        return f"measured: {self.gflops:.0f} GFLOP/s, {self.head_ms:.0f} ms a head{sample}{torch}"


class StoredSpeed(Struct, frozen=True):
    """A speed and the set-up on which it was measured."""

    setup: str
    speed: Speed


def speed(
    folder: Path,
    setup: str,
    installed: InstalledRelease | None,
    features: Features,
    *,
    training: bool = False,
) -> Speed:
    """Return the stored speed of this set-up, or measure and store it; torch is timed only if `training`."""
    extractor = installed.manifest.extractor.sha256 if installed else ""
    setup = f"{setup} {extractor} {version('torch') if training else ''}"
    if (stored := read_json(folder / FILE, StoredSpeed)) and stored.setup == setup:
        return stored.speed
    measured = measure(steps(installed, features, training=training))
    with suppress(OSError):
        make_folder(folder)
        write_json(folder / FILE, StoredSpeed(setup, measured))
    return measured


def measure(steps: Steps, clock: Callable[[], float] = time.monotonic) -> Speed:
    """Run the measurements in order; those that would start after LIMIT_S are skipped."""
    end_s, results = clock() + LIMIT_S, dict[str, float]()
    for name, step in steps.items():
        if results and clock() >= end_s:
            break
        results[name] = step()
    return Speed(**results)


def steps(installed: InstalledRelease | None, features: Features, *, training: bool) -> Steps:
    """Return the possible measurements, the cheapest first."""
    steps: Steps = {"gflops": _gflops, "head_ms": _head_ms}
    if installed:
        steps["sample_ms"] = lambda: 1000 * _cpu_s(lambda: features(installed, SAMPLES)) / SAMPLES
    if training and version("torch"):
        steps["torch_s"] = _torch_s
    return steps


def reach_ms(endpoint: Endpoint) -> float:
    """Milliseconds to open a TCP connection to the broker, about one round trip; 0 if that fails within a second."""
    started_s = time.monotonic()
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=REACH_S).close()
    except OSError:
        return 0.0
    return 1000 * (time.monotonic() - started_s)


def _gflops() -> float:
    matrix = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    return 2e-9 * SIDE**3 / max(min(_cpu_s(lambda: matrix @ matrix) for _ in range(4)), 1e-6)


def _head_ms() -> float:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(200, 128)).astype(np.float32), np.arange(200) % 10
    return 1000 * _cpu_s(lambda: heads.fit("mlp", z, y, 10, unit_norm=False))


def _torch_s(command: str = "import torch") -> float:
    """Wall time to import torch, since it mostly waits for the disk; LIMIT_S on a slow board, 0 if the import fails."""
    for _ in range(KILLS):  # the result is kept, so an accident must not count
        started_s = time.monotonic()
        try:
            code = subprocess.run(
                [sys.executable, "-P", "-c", command], capture_output=True, check=False, timeout=LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            return LIMIT_S
        except OSError:
            return 0.0
        if code >= 0:
            return 0.0 if code else time.monotonic() - started_s
    return 0.0


def _cpu_s(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    before = time.thread_time()
    work()
    return time.thread_time() - before
