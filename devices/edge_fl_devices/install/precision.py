"""Choose the precision of a release's extractor, float32 or int8: the owner's choice, or by memory and measured latency."""

from dataclasses import dataclass
from typing import Literal

from edge_fl.release.manifests import Manifest, Precision

MEBIBYTE = 1024 * 1024
RUNTIME_FACTOR = 3  # memory that an extractor takes while it runs, as a multiple of its file size
MEMORY_SHARE = 4  # an extractor may take one part in four of the memory


@dataclass(frozen=True, slots=True)
class PrecisionLimits:
    """Precision, or "auto": int8 where float32 takes too much of `memory_mb` (0: unlimited) or more than `latency_ms` per image."""

    precision: Literal["auto", "fp32", "int8"] = "auto"
    memory_mb: int = 0
    latency_ms: float = 250.0


PRECISION_LIMITS = PrecisionLimits()


def choose(
    manifest: Manifest, limits: PrecisionLimits, serving: Manifest | None, measured_ms: float
) -> Precision:
    """Choose the precision for `manifest`, given the release served so far and its latency per image (0: not measured).

    A device that uses int8 keeps it, since its measurement says nothing about float32.
    """
    if "int8" not in manifest.variants or limits.precision == "fp32":
        return "fp32"
    needed_bytes = RUNTIME_FACTOR * manifest.extractor.bytes
    too_large = bool(limits.memory_mb) and needed_bytes > limits.memory_mb * MEBIBYTE / MEMORY_SHARE
    too_slow = serving is not None and (serving.precision == "int8" or measured_ms > limits.latency_ms)
    return "int8" if limits.precision == "int8" or too_large or too_slow else "fp32"
