"""The study of wrong labels on devices with separable classes."""

import numpy as np
import pytest

from edge_fl.console import tables
from tests.tools.study.test_day_zero import made
from tools.study import wrong_labels
from tools.study.wrong_labels import CHANCE, CONFUSIONS, PAIR, SHARES, SHOWN


@pytest.mark.parametrize("share", SHARES)
def test_the_stated_share_of_labels_is_made_wrong(share: str) -> None:
    y = np.repeat(np.arange(5), 20)
    given = wrong_labels.injected(y, 5, share, np.random.default_rng(0))
    changed = np.flatnonzero(given != y)
    assert len(changed) == {"0": 0, "0.05": 5, "0.1": 10, PAIR: 10}[share]
    assert given.min() >= 0 and given.max() < 5
    if share == PAIR:
        assert len({*y[changed]}) == len({*given[changed]}) == 1


def test_the_shown_list_holds_more_wrong_labels_than_chance_and_the_table_says_of_how_many() -> None:
    found: dict[tuple[str, ...], list[wrong_labels.Counts]] = {}
    for key, counts in wrong_labels.of_cell(made(), 4):
        found.setdefault(key, []).append(counts)
    confusions = [found.pop(key) for key in sorted(found) if key[-1] == CONFUSIONS]
    assert confusions and all(0 <= hits <= named <= 3 for each in confusions for *_, named, hits in each)
    assert len(found) == 2 * len(SHARES) * 5 and {len(each) for each in found.values()} == {4}
    for labels, of_each in (("5", 15), ("20", 45)):
        shown, chance = (np.sum(found["made", labels, "0.1", name], axis=0) for name in (SHOWN, CHANCE))
        assert shown[0] == 4 * of_each and shown[2] == chance[2]
        assert shown[3] > 2 * chance[3] and shown[3] >= 0.4 * shown[1]
    (line,) = [
        line
        for line in tables.markdown(wrong_labels.table(found)).splitlines()
        if line.startswith("| made | 20 | 0.1 | shown |")
    ]
    assert " 4 | 16 of 180 | " in line and " to " in line
