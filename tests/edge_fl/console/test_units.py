"""Accuracies, differences, sizes and durations as text."""

import pytest

from edge_fl.console import units


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.923, "92.3 %"), (1.0, "100.0 %"), (0, "0.0 %"), (None, "-"), (float("nan"), "-")],
)
def test_shares_are_per_cent_with_one_decimal(share: float | None, text: str) -> None:
    assert units.percent(share) == text


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (0.0214, "+2.1 points"),
        (-0.05, "-5.0 points"),
        (-0.0001, "+0.0 points"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_differences_have_a_sign(difference: float | None, text: str) -> None:
    assert units.points(difference) == text


@pytest.mark.parametrize(
    ("bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (300 * 1024, "300 KiB"),
        (5 * 1024**2, "5.0 MiB"),
        (None, "-"),
    ],
)
def test_sizes_have_a_binary_unit(bytes: float | None, text: str) -> None:
    assert units.size(bytes) == text
