"""Hyper-parameters: values outside their declaration are refused, and the message says what is expected."""

import math
from typing import Any

import pytest

from edge_fl.errors import MethodError
from edge_fl.methods.contract.method import Hyper, check_hypers

KNOWN: dict[str, tuple[Any, Hyper]] = {
    "mu": (0.1, Hyper("pull", low=0)),
    "share": (0.5, Hyper("share", low=0, high=1)),
    "slope": (-0.5, Hyper("slope", high=1)),
    "steps": (3, Hyper("steps", low=1)),
    "single": (False, Hyper("one for all")),
    "kind": ("in", Hyper("kind", choices=("in", "out"))),
    "mixed": ("auto", Hyper("kind", choices=("auto", True))),
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mu", -1, "0 to inf"),
        ("mu", math.nan, "0 to inf"),
        ("share", 1.5, "0 to 1"),
        ("slope", 2, "-inf to 1"),
        ("mu", "0.1", "a number"),
        ("steps", 1.5, "a whole number"),
        ("steps", True, "int"),
        ("single", 1, "true or false"),
        ("kind", "up", "one of 'in', 'out'"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is_expected(
    name: str, value: Any, expected: str
) -> None:
    with pytest.raises(MethodError) as refused:
        check_hypers("fedx", {name: value}, KNOWN)
    assert f"method fedx: {name} = {value!r}, expected {expected}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mu", 0),
        ("mu", 1e9),
        ("share", 1.0),
        ("slope", -1e9),
        ("steps", 1),
        ("single", True),
        ("kind", "out"),
        ("mixed", True),
    ],
)
def test_the_ends_of_a_range_and_all_choices_are_allowed(name: str, value: Any) -> None:
    check_hypers("fedx", {name: value}, KNOWN)
