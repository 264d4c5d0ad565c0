"""The results of every method equal the recorded numbers (record.py defines them and their tolerance)."""

import pytest

from edge_fl.methods import names
from tests.golden import record
from tests.golden.record import ACCURACY_TOLERANCE, TOLERANCE


@pytest.mark.parametrize("name", names())
def test_three_rounds_give_the_recorded_numbers(name: str) -> None:
    assert record.path_of(name).is_file(), f"no golden numbers yet: python -m tests.golden {name}"
    found, expected = record.record(name), record.read(name)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=ACCURACY_TOLERANCE)
    for kind in ("shared", "personal"):
        assert found[kind].keys() == expected[kind].keys()
        for part, (length, along) in expected[kind].items():
            tolerance = TOLERANCE * max(length, 1)
            assert found[kind][part] == pytest.approx([length, along], rel=0, abs=tolerance), f"{kind} {part}"


def test_there_are_no_numbers_of_removed_methods() -> None:
    assert {path.stem for path in record.FOLDER.glob("*.json")} <= set(names())
