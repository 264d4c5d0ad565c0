"""Weighted averages of parameters as masked sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edge_fl.errors import SecureSumError
from edge_fl.secure import weighted
from edge_fl.secure.member import Member
from edge_fl.seeds import generator
from edge_fl.wire.messages import SumRequest
from tests.edge_fl.secure.cohorts import Cohort, names_of


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
    vectors = {name: weighted.flat(parts[name], weights[name]) for name in names}
    request = SumRequest("update", 3, len(vectors["pi-00"]))
    result = Cohort(thirty, vectors, request, gone={"shares": ("pi-02",)}).run()
    average, weight = weighted.average(result.vector, parts["pi-00"])

    remaining = [name for name in names if name != "pi-02"]
    assert weight == sum(weights[name] for name in remaining)
    for part, tensors in parts["pi-00"].items():
        for name, tensor in tensors.items():
            exact = sum(weights[d] * parts[d][part][name].astype(float) for d in remaining) / weight
            assert average[part][name].shape == tensor.shape
            assert np.abs(average[part][name] - exact).max() <= 1e-6 / weight


def test_an_average_without_weight_is_an_error() -> None:
    with pytest.raises(SecureSumError, match="a total weight of 0, expected more than 0"):
        weighted.average(weighted.flat(parts_of(1), 0.0), parts_of(1))
