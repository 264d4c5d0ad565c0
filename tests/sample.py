"""Samples of a sweep: CI runs some of its cases, `make nightly` all of them."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def sample(cases: Sequence[str], in_ci: Collection[str], *marks: pytest.MarkDecorator) -> list[Any]:
    """Parameters with `marks`; those outside `in_ci` are also marked nightly."""
    assert set(in_ci) <= set(cases), f"no such cases: {set(in_ci) - set(cases)}"
    later = (*marks, pytest.mark.nightly)
    return [pytest.param(case, marks=marks if case in in_ci else later, id=case) for case in cases]
