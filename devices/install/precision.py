"""Which of a release's extractors a device runs, floats or 8-bit whole numbers: as its owner says, or as it has measured itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_fl.release.manifest import Manifest, Precision

MEBIBYTE = 1024 * 1024
HELD = 3  # times its size is what an extractor takes up while it runs
SHARE = 4  # of the memory, one part may go to it


@dataclass(frozen=True, slots=True)
class PrecisionLimits:
    """What the extractor may cost: "auto" takes int8 where floats need too much of `memory_mb` (0: plenty) or more than `latency_ms`."""

    precision: Literal["auto", "fp32", "int8"] = "auto"
    memory_mb: int = 0
    latency_ms: float = 250.0


PRECISION_LIMITS = PrecisionLimits()


def choose(
    manifest: Manifest, limits: PrecisionLimits, serving: Manifest | None, measured_ms: float
) -> Precision:
    """The precision to run `manifest` in, after one image took `measured_ms` (0: not measured) with what served until now.

    A device that has turned to int8 stays there, as its measurement says nothing about floats.
    """
    if "int8" not in manifest.variants or limits.precision == "fp32":
        return "fp32"
    needed = HELD * manifest.extractor.bytes
    too_large = bool(limits.memory_mb) and needed > limits.memory_mb * MEBIBYTE / SHARE
    too_slow = serving is not None and (serving.precision == "int8" or measured_ms > limits.latency_ms)
    return "int8" if limits.precision == "int8" or too_large or too_slow else "fp32"
