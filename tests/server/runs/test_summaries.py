"""Paired differences: the same clients on both sides, with their number and a 95 % interval."""

from math import isnan, nan

import pytest

from edge_fl_server.runs import summaries


def test_a_paired_difference_is_over_the_clients_that_have_both_values() -> None:
    before = {"a": 0.5, "b": 0.6, "c": 0.7, "d": nan, "only before": 0.0}
    after = {"a": 0.6, "b": 0.8, "c": 0.7, "d": 0.9, "only after": 1.0}
    found = summaries.paired(before, after)
    assert found and found.n == 3 and found.mean == pytest.approx(0.1)
    # Differences 0.1, 0.2, 0: standard error 0.1 / sqrt(3), and t of 2 degrees of freedom is 4.3027.
    assert (found.low, found.high) == pytest.approx((0.1 - 0.2484, 0.1 + 0.2484), abs=1e-4)


def test_one_client_has_a_difference_without_an_interval_and_none_has_no_difference() -> None:
    found = summaries.paired({"a": 1.0, "b": 0.5}, {"a": 1.0})
    assert found and (found.mean, found.n) == (0.0, 1) and isnan(found.low) and isnan(found.high)
    assert summaries.paired({"a": 1.0}, {"b": 0.9}) is None
