"""The page on personal heads states the constants of the served head."""

from pathlib import Path

import pytest

from edge_fl.heads import served

PAGE = Path(__file__).parents[3] / "docs" / "personal-heads.md"
ROWS = {
    "PSEUDO_COUNT": (served.PSEUDO_COUNT,),
    "STRENGTHS": (min(served.STRENGTHS), served.DECAY, served.USUAL, served.USUAL_DIRECTED),
    "OWN_STRENGTHS": (*served.OWN_STRENGTHS, served.OWN_PRIOR),
    "SQUARED_STRENGTHS": (*served.SQUARED_STRENGTHS, served.LEAST_PER_CLASS, served.OWN_PRIOR),
    "OWN_SCALE": (served.SCALE, served.OWN_SCALE),
    "ENOUGH": (served.ENOUGH,),
    "SURE": (served.SURE,),
    "DOUBT": (served.DOUBT,),
}


@pytest.mark.parametrize("name", ROWS)
def test_its_table_has_the_values_of_the_code(name: str) -> None:
    lines = PAGE.read_text().replace("−", "-").splitlines()
    (row,) = [line for line in lines if f"`{name}`" in line]
    words = row.split("|")[2].replace(",", " ").replace(";", " ").replace(":", " ").split()
    assert {f"{value:g}" for value in ROWS[name]} <= {*words}, f"{PAGE.name}: {row}"


def test_its_objective_has_the_doubt_of_the_code() -> None:
    assert f"{1 - served.DOUBT:g} p_k(" in PAGE.read_text()
