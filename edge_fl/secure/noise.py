"""Distributed Gaussian noise: every device adds a share of it before masking, so that the sum satisfies differential privacy.

Each of at least t devices adds noise with standard deviation z * clip / sqrt(t) to its clipped vector, so that the sum's noise has a
standard deviation of at least z * clip. Noise is rounded like the vector; it is not hardened against attacks on floating point.
"""

import math
import os
from collections.abc import Callable

import numpy as np

from edge_fl.secure.fixed_point import Vector

Noise = Callable[[int], Vector]
"""n -> standard normal numbers, float64 [n]."""


def secret(count: int) -> Vector:
    """Standard normal numbers from the operating system's random source (Box and Muller 1958)."""
    bits = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count) >> np.uint64(11)
    first, second = (bits + 0.5) * 2.0**-53
    numbers: Vector = np.sqrt(-2 * np.log(first)) * np.cos(2 * math.pi * second)
    return numbers


def clipped(vector: Vector, clip: float) -> Vector:
    """Shorten a vector to the L2 norm `clip`; 0 leaves it as it is."""
    norm = float(np.linalg.norm(vector))
    return vector * (clip / norm) if clip and norm > clip else vector


def share(count: int, clip: float, noise_multiplier: float, threshold: int, noise: Noise) -> Vector:
    """One device's share of the noise."""
    return noise_multiplier * clip / math.sqrt(threshold) * noise(count)
