"""Fixed-point numbers: the error of a sum, the range, and six bytes on the wire."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.errors import SecureSumError
from edge_fl.secure import fixed_point
from edge_fl.seeds import generator
from edge_fl.wire.messages import MAX_SUM_DEVICES

cohorts = st.integers(3, MAX_SUM_DEVICES)


@given(devices=cohorts, seed=st.integers(0, 2**32))
def test_a_sum_of_any_cohort_is_within_the_stated_error(devices: int, seed: int) -> None:
    rng, limit = generator(seed, "fixed point"), fixed_point.limit(devices)
    vectors = rng.uniform(-limit, limit, (devices, 20))
    total = np.zeros(20, np.uint64)
    for vector in vectors:
        total += fixed_point.encode(vector, devices)
    found = fixed_point.decode(total, devices)
    exact = np.array([float(sum(map(Fraction, column))) for column in vectors.T])
    assert np.abs(found - exact).max() <= fixed_point.ERROR


@given(devices=cohorts)
def test_the_largest_numbers_of_all_devices_do_not_overflow(devices: int) -> None:
    limit = fixed_point.limit(devices)
    for extreme in (limit, -limit):
        total = np.zeros(1, np.uint64)
        for _ in range(devices):
            total += fixed_point.encode(np.array([extreme]), devices)
        assert abs(fixed_point.decode(total, devices)[0] - devices * extreme) <= fixed_point.ERROR


def test_the_documented_limits() -> None:
    assert [round(fixed_point.limit(n)) for n in (5, 10, 30, 100)] == [6_710_886, 1_677_722, 279_620, 20_972]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 300_000.0, -300_000.0, 1e300])
def test_a_number_out_of_range_is_named_by_its_place_only(wrong: float) -> None:
    vector = np.zeros(10)
    vector[3] = wrong
    with pytest.raises(
        SecureSumError, match=r"number 3 of 10: .* 279,620, .* no statistic was revealed$"
    ) as raised:
        fixed_point.encode(vector, 30)
    assert raised.value.why == "out_of_range"
    assert "300" not in str(raised.value)


@given(st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=50))
def test_six_bytes_per_number(numbers: list[int]) -> None:
    array = np.array(numbers, np.uint64)
    payload = fixed_point.to_bytes(array)
    assert payload == b"".join(number.to_bytes(6, "little") for number in numbers)
    assert (fixed_point.from_bytes(payload) == array).all()
