"""A sample of the study of forecasts: outcomes of a made-up cell, the constants that are fitted, and the table."""

import numpy as np

from edge_fl.console import tables
from edge_fl.heads import forecast
from tests.tools.study.test_day_zero import made
from tools.study import forecasts
from tools.study.forecasts import Outcome


def test_forecasts_of_a_cell_cover_what_came() -> None:
    cell = made(labels=60, tests=300)
    found = [*forecasts.outcomes(cell, 4)]
    assert {(each.k, each.labels, each.more) for each in found} == {
        (3, 9, 20), (3, 9, 9), (5, 15, 20), (5, 15, 15), (10, 30, 20), (10, 30, 30),
    }  # fmt: skip
    said = [each.forecast() for each in found]
    covered = [one.low <= each.after <= one.high for each, one in zip(found, said, strict=True)]
    assert np.mean(covered) > 0.65 and len(covered) == 24
    assert (
        abs(np.mean([one.gain for one in said]) - np.mean([each.after - each.now for each in found])) < 0.04
    )
    again = {each.labels + each.more: each.after for each in found[:6]}
    assert found[4].now == again[30], "the outcome of one state is what another one begins with"


def made_up(dataset: str, gain: float) -> list[Outcome]:
    """Devices whose first labels add nothing, and whose next ones this much."""
    return [Outcome(dataset, place, 10, 5, 20, 0.6, 0.6, 0.6, 0.6 + gain, 500) for place in "ab"]


def test_constants_are_those_of_the_other_data_sets() -> None:
    slow, fast = made_up("slow", 0.0), made_up("fast", 0.2)
    gains = [fast[0].forecast(forecasts.fitted(found)).gain for found in (fast, slow)]
    assert gains[0] > gains[1] + 0.05
    note, enough = forecasts.table([*slow, *fast]).notes
    assert f"slow {tuple(forecasts.fitted(fast))}; fast {tuple(forecasts.fitted(slow))}" in note
    assert "of 4 forecasts of 20 more labels" in enough


def test_the_table_has_a_line_for_each_number_of_labels_and_counts_places_alike() -> None:
    found = [*made_up("one", 0.2), *made_up("two", 0.2)]
    lines = tables.markdown(forecasts.table(found)).splitlines()
    assert sum(line.startswith("| one") for line in lines) == 2
    assert forecasts._share(np.array([True, True, False, True]), ["a", "a", "b", "b"]).startswith(
        "75 (0 to 100"
    )


def test_labels_of_one_class_are_compared_with_the_next_ones() -> None:
    found = [*forecasts.one_class(made(labels=90, tests=200), 4)]
    assert found and {kind for kind, _, _ in found} == {"made, made"}
    ((_, n, *_),) = forecasts.table_of_one_class(found).rows
    assert n == str(len(found))


def test_constants_of_the_product_are_among_those_that_are_tried() -> None:
    assert forecast.USUAL in forecasts.CURVES
