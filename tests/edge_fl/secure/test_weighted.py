"""Weighted averages of parameters as masked sums: each device sends weight * parameters, followed by the weight."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edge_fl.errors import SecureSumError
from edge_fl.secure.fixed_point import Vector
from edge_fl.secure.terms import Member
from edge_fl.seeds import generator
from edge_fl.wire.messages import SumRequest
from edge_fl.wire.tensors import Arrays
from tests.edge_fl.secure.cohorts import Cohort, names_of


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


def parts_of(seed: int) -> dict[str, dict[str, Any]]:
    rng = generator(seed, "parts")
    return {
        "head": {
            "weight": rng.normal(size=(3, 4)).astype("float32"),
            "bias": rng.normal(size=3).astype("float32"),
        },
        "extractor": {"scale": np.float32(rng.normal()).reshape(())},
    }


def test_the_average_is_that_of_weighted_parameters_and_no_weight_is_sent(
    thirty: Mapping[str, Member],
) -> None:
    names = names_of(8)
    parts = {name: parts_of(number) for number, name in enumerate(names)}
    weights = {name: 10.0 * number + 5 for number, name in enumerate(names)}
    vectors = {name: flat(parts[name], weights[name]) for name in names}
    request = SumRequest("update", 3, len(vectors["pi-00"]))
    result = Cohort(thirty, vectors, request, gone={"shares": ("pi-02",)}).run()
    found, weight = average(result.vector, parts["pi-00"])

    remaining = [name for name in names if name != "pi-02"]
    assert weight == sum(weights[name] for name in remaining)
    for part, tensors in parts["pi-00"].items():
        for name, tensor in tensors.items():
            exact = sum(weights[d] * parts[d][part][name].astype(float) for d in remaining) / weight
            assert found[part][name].shape == tensor.shape
            assert np.abs(found[part][name] - exact).max() <= 1e-6 / weight


def test_an_average_without_weight_is_an_error() -> None:
    with pytest.raises(SecureSumError, match="a total weight of 0, expected more than 0"):
        average(flat(parts_of(1), 0.0), parts_of(1))
