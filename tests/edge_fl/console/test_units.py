"""Accuracies, differences, sizes and durations as text."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.console import units
from edge_fl.errors import InputError


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
    ("values", "texts"),
    [
        ((0.021, 0.007, 0.035), ("+2.1", "+0.7", "+3.5")),
        ((0.018, 0.0003, 0.0357), ("+1.80", "+0.03", "+3.57")),
        ((-0.02, -0.04, -0.000002), ("-2.0000", "-4.0000", "-0.0002")),
        ((0.001, -0.0003, 0.002), ("+0.1", "+0.0", "+0.2")),  # it holds 0
        ((0.02, None, None), ("+2.0", "-", "-")),
        ((0.02, float("nan"), float("nan")), ("+2.0", "-", "-")),
    ],
)
def test_the_end_of_an_interval_that_excludes_0_is_never_shown_as_0(
    values: tuple[float, float | None, float | None], texts: tuple[str, str, str]
) -> None:
    assert units.difference(*values) == texts


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_an_interval_says_what_its_verdict_says(one: float, other: float) -> None:
    low, high = sorted((one, other))
    shown = [float(text) for text in units.difference((low + high) / 2, low, high)[1:]]
    if low > 0 or high < 0:
        assert 0 not in shown


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


def test_a_moment_is_a_time_in_utc_or_an_age() -> None:
    now = datetime(2026, 11, 24, 12, tzinfo=UTC)
    for text, moment in (
        ("2026-11-23", "2026-11-23T00:00:00+00:00"),
        ("2026-11-23T14:00", "2026-11-23T14:00:00+00:00"),
        ("2026-11-23T14:00+01:00", "2026-11-23T13:00:00+00:00"),
        ("2h", "2026-11-24T10:00:00+00:00"),
        ("1d", "2026-11-23T12:00:00+00:00"),
        ("today", "2026-11-24T00:00:00+00:00"),
        ("yesterday", "2026-11-23T00:00:00+00:00"),
    ):
        assert units.parse_moment(text, "--since", now).isoformat() == moment
    with pytest.raises(InputError, match=r"--since 'tomorrow': expected a day or time in UTC.* or an age"):
        units.parse_moment("tomorrow", "--since", now)
