"""A device's vector for a secure sum: clipped, with noise, and in fixed point modulo 2^48, six bytes a number, little-endian on the wire.

Distributed Gaussian noise makes the sum satisfy differential privacy: each of at least t devices adds noise with standard deviation
z * clip / sqrt(t) to its clipped vector, so that the sum's noise has at least z * clip. Noise is rounded like the vector; it is not
hardened against attacks on floating point.

The number of fraction bits follows from the size n of the cohort: rounding n numbers changes their sum by at most n / 2^(bits + 1) <= 1e-6.
The absolute value of each number may be up to `limit(n)`, so that the sum does not overflow.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import SecureSumError
from edge_fl.failures import Failure

BITS, BYTES = 48, 6
ERROR = 1e-6

Numbers = NDArray[np.uint64]
Vector = NDArray[np.float64]

_MODULUS_MASK = np.uint64(2**BITS - 1)
_SIGN = 2 ** (BITS - 1)

Noise = Callable[[int], Vector]
"""n -> standard normal numbers, float64 [n]."""


def fraction_bits(devices: int) -> int:
    """Bits after the point in a cohort of this size."""
    return math.ceil(math.log2(devices / (2 * ERROR)))


def limit(devices: int) -> float:
    """The largest absolute value of a number of one device: 279,620 for 30 devices, 20,971 for 100."""
    return float((_SIGN - 1) // devices / 2 ** fraction_bits(devices))


def encode(vector: Vector, devices: int) -> Numbers:
    """Encode a device's vector for a cohort of `devices`. Raises SecureSumError for NaN, infinity and values above the limit."""
    outside = ~(np.abs(vector) <= limit(devices))
    if outside.any():
        raise SecureSumError(
            f"number {int(outside.argmax())} of {len(vector)}: not finite or above {limit(devices):,.0f}, the limit for"
            f" {devices} devices",
            Failure.OUT_OF_RANGE,
        )
    scaled = np.rint(vector * 2.0 ** fraction_bits(devices)).astype(np.int64)
    return reduced(scaled.view(np.uint64))


def decode(total: Numbers, devices: int) -> Vector:
    """Decode a sum over vectors that were encoded for a cohort of `devices`."""
    signed = (reduced(total) ^ np.uint64(_SIGN)).view(np.int64) - _SIGN
    vector: Vector = signed / 2.0 ** fraction_bits(devices)
    return vector


def reduced(numbers: Numbers) -> Numbers:
    """Numbers modulo 2^48; arithmetic in between may wrap around at 2^64."""
    return numbers & _MODULUS_MASK


def to_bytes(numbers: Numbers) -> bytes:
    """Six bytes for each number, which must be reduced."""
    return numbers.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :BYTES].tobytes()


def from_bytes(payload: bytes) -> Numbers:
    """Inverse of `to_bytes`."""
    wide = np.zeros((len(payload) // BYTES, 8), np.uint8)
    wide[:, :BYTES] = np.frombuffer(payload, np.uint8).reshape(-1, BYTES)
    return wide.view("<u8").reshape(-1).astype(np.uint64)


def secret_noise(count: int) -> Vector:
    """Standard normal numbers from the operating system's random source (Box and Muller 1958)."""
    bits = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count) >> np.uint64(11)
    first, second = (bits + 0.5) * 2.0**-53
    numbers: Vector = np.sqrt(-2 * np.log(first)) * np.cos(2 * math.pi * second)
    return numbers


def clipped(vector: Vector, clip: float) -> Vector:
    """Shorten a vector to the L2 norm `clip`; 0 leaves it as it is."""
    norm = float(np.linalg.norm(vector))
    return vector * (clip / norm) if clip and norm > clip else vector


def noise_share(count: int, clip: float, noise_multiplier: float, threshold: int, noise: Noise) -> Vector:
    """One device's share of the noise."""
    return noise_multiplier * clip / math.sqrt(threshold) * noise(count)
