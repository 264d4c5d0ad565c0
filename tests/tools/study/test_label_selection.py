"""The table of label selection on separable pictures of unequal classes."""

from pathlib import Path

import numpy as np
import pytest

from tools.study import label_selection
from tools.study.label_selection import Plan, labels_needed
from tools.study.predictions import DOMAINS


def test_informative_pictures_need_fewer_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    centres = rng.random((6, 24)) ** 3
    for domain in DOMAINS:
        y = np.repeat(np.arange(6), [50, 20, 10, 8, 6, 6])
        z = centres[y] + 0.05 * rng.random((100, 24))
        np.savez(tmp_path / f"{domain}-100.npz", z=z.astype(np.float32), y=y)
    options = ["--pictures", "100", "--seeds", "2", "--budget", "20", "--batch", "4"]
    label_selection.main(["--out", str(tmp_path), *options])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| mean of all"))
    random, *_, both = row.strip("| ").split(" | ")[1:]
    assert float(random) < 0.99 and int(both) <= 12


def test_labels_needed_are_those_of_the_first_batch_that_reaches_the_accuracy() -> None:
    plan = Plan(budget=40, batch=10)
    assert labels_needed(np.array([0.5, 0.7, 0.69, 0.8]), 0.7, plan) == "20"
    assert labels_needed(np.array([0.5, 0.6, 0.6, 0.6]), 0.7, plan) == "more than 40"
