"""Weighted averages as a secure sum: each device sends weight * parameters, followed by the weight.

The server learns the average and the total weight, but no device's parameters or weight.
"""

from __future__ import annotations

import numpy as np

from edge_fl.errors import SecureSumError
from edge_fl.secure.fixed_point import Vector
from edge_fl.wire.tensors import Arrays


def flat(parts: Arrays, weight: float) -> Vector:
    """The vector of one device: all tensors by name, times the weight, then the weight."""
    tensors = [np.ravel(parts[part][name]) for part in sorted(parts) for name in sorted(parts[part])]
    return np.concatenate([*(weight * tensor.astype(np.float64) for tensor in tensors), [weight]])


def average(total: Vector, like: Arrays) -> tuple[dict[str, dict[str, Vector]], float]:
    """(average, total weight) of a sum of vectors; `like` has its names and shapes. Raises SecureSumError without any weight."""
    weight = float(total[-1])
    if weight <= 0:
        raise SecureSumError(f"weighted average: a total weight of {weight:g}, expected more than 0")
    parts: dict[str, dict[str, Vector]] = {part: {} for part in like}
    begin = 0
    for part in sorted(like):
        for name in sorted(like[part]):
            tensor = like[part][name]
            parts[part][name] = (total[begin : begin + tensor.size] / weight).reshape(tensor.shape)
            begin += tensor.size
    return parts, weight
