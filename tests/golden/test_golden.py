"""Nothing that a method computes changes unnoticed (see record.py for what the numbers are and how closely they must hold)."""

from __future__ import annotations

import pytest

from edge_fl.methods import names
from tests.golden import record
from tests.golden.record import ACCURACY_TOLERANCE, TOLERANCE


@pytest.mark.parametrize("name", names())
def test_three_rounds_give_the_numbers_that_stand(name: str) -> None:
    assert record.path_of(name).is_file(), f"no golden numbers yet: python -m tests.golden {name}"
    found, expected = record.record(name), record.read(name)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=ACCURACY_TOLERANCE)
    for kind in ("shared", "personal"):
        assert found[kind].keys() == expected[kind].keys()
        for part, (length, along) in expected[kind].items():
            tolerance = TOLERANCE * max(length, 1)
            assert found[kind][part] == pytest.approx([length, along], rel=0, abs=tolerance), f"{kind} {part}"


def test_no_numbers_are_kept_of_methods_that_are_gone() -> None:
    assert {path.stem for path in record.FOLDER.glob("*.json")} <= set(names())
