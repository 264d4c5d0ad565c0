"""The study of flicker counts the changes that there are, and the delay of each."""

import numpy as np

from tools.study.consensus import Case, table, watched


def test_without_flicker_the_state_follows_after_the_consensus_time_and_no_other_change_is_counted() -> None:
    raw, stable, delays = watched(Case(5, 0.0, "3/5", 2.0), hours=0.5)
    assert raw == stable == 28 and len(delays) == 14 and np.allclose(delays, 2.4)


def test_with_flicker_the_state_changes_a_tenth_as_often() -> None:
    (row,) = table([Case(5, 0.1, "3/5", 10)], hours=1).rows
    raw, stable = (float(row[column].replace(",", "")) for column in (4, 5))
    assert raw > 3000 and stable == 29 and row[-1] in ("97%", "100%")
