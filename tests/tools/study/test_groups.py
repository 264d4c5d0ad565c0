"""The study of groups on a few pictures."""

from pathlib import Path

from edge_fl.data import datasets
from tools.study.groups import table


def test_clean_pictures_stay_apart_and_changed_copies_do_not() -> None:
    x = datasets.load("digits", Path("nowhere")).samples.x
    (line,) = table({"digits": x}, 300, copies=10, scenes=2).rows
    assert line[:3] == ["digits", "300", "0.0000"] and float(line[3]) == 1.0
