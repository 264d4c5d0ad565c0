"""The self-benchmark: how fast this board computes, in a second or two and never more than 20; it decides the tier, once per set-up.

Run in the child that also counts the data, on one thread; processor seconds are counted, so that a busy neighbour does not lower a tier.
The result is kept in FOLDER/benchmark.json under what it depends on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl import atomic, heads
from edge_fl.release.artefact import Installed

LIMIT_S = 20.0
FILE = "benchmark.json"
SIDE = 384
IMAGES = 8
Features = Callable[[Installed, int], None]
"""Computes the features of so many images through an installed extractor."""


class Speed(Struct, frozen=True):
    """Processor milliseconds per head fit (MLP, 200 features of 128) and per image through the installed extractor; 0: not measured."""

    gflops: float = 0.0
    head_ms: float = 0.0
    image_ms: float = 0.0

    def __str__(self) -> str:
        image = f", {self.image_ms:.1f} ms an image" if self.image_ms else ""
        return f"measured: {self.gflops:.0f} GFLOP/s, {self.head_ms:.0f} ms a head{image}"


class Kept(Struct, frozen=True):
    """A speed, and the set-up that it was measured on."""

    setup: str
    speed: Speed


def speed(folder: Path, setup: str, installed: Installed | None, features: Features) -> Speed:
    """What was measured on this set-up before, or is now."""
    extractor = installed.manifest.extractor.sha256 if installed else ""
    setup = f"{setup} {extractor}"
    with suppress(OSError, msgspec.DecodeError):
        kept = msgspec.json.decode((folder / FILE).read_bytes(), type=Kept)
        if kept.setup == setup:
            return kept.speed
    found = measure(installed, features)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / FILE, msgspec.json.encode(Kept(setup, found)))
    return found


def measure(
    installed: Installed | None, features: Features, clock: Callable[[], float] = time.monotonic
) -> Speed:
    """Measures, the cheapest first; what would begin after LIMIT_S is left out."""
    ends_s, found = clock() + LIMIT_S, dict[str, float]()
    for name, step in _steps(installed, features):
        if found and clock() >= ends_s:
            break
        found[name] = step()
    return Speed(**found)


def _steps(installed: Installed | None, features: Features) -> Iterator[tuple[str, Callable[[], float]]]:
    yield "gflops", _gflops
    yield "head_ms", _head_ms
    if installed:
        yield "image_ms", lambda: 1000 * _taken(lambda: features(installed, IMAGES)) / IMAGES


def _gflops() -> float:
    matrix = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    return 2e-9 * SIDE**3 / max(min(_taken(lambda: matrix @ matrix) for _ in range(4)), 1e-6)


def _head_ms() -> float:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(200, 128)).astype(np.float32), np.arange(200) % 10
    return 1000 * _taken(lambda: heads.fit("mlp", z, y, 10, unit_norm=False))


def _taken(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    before = time.thread_time()
    work()
    return time.thread_time() - before
