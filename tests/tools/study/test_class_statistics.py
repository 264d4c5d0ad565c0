"""The study of class statistics: a small federation through all its tables, and the accuracies that it promises on PACS."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl.console import tables
from tests.tools.study.pacs import DATA, needs_backbone, needs_pacs
from tools.study import class_statistics
from tools.study.class_statistics import Cell
from tools.study.predictions import DOMAINS, Pictures, features

PICTURES, SEEDS = 300, 3


def styles(pictures: int = 90, dim: int = 60) -> dict[str, Pictures]:
    """Four domains with the same classes, each shifted by its style."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, dim))
    found = {}
    for domain in DOMAINS:
        y = np.arange(pictures) % 3
        z = 0.8 * centres[y] + 2 * rng.normal(size=dim) + 1.5 * rng.normal(size=(pictures, dim))
        found[domain] = Pictures(z.astype(np.float32), y)
    return found


def test_a_small_federation_gains_with_few_labels_and_fills_both_tables() -> None:
    cells = (Cell(1, "1"), Cell(1, "all"), Cell(10, "all"))
    found = {cell: class_statistics.measured(styles(), cell, 2, ("cosine", "nearest")) for cell in cells}
    assert [found[cell].prior.shape for cell in cells] == [(2, 4)] * 3
    assert found[Cell(1, "all")].gains.mean() > 10
    assert found[Cell(1, "all")].gains.mean() > found[Cell(1, "1")].gains.mean() > 0
    accuracy = tables.markdown(class_statistics.accuracy_table(found)).splitlines()
    assert any(line.startswith("| 1 | all |") for line in accuracy)
    assert len(class_statistics.domain_table(found).rows) == 3


def test_labels_of_a_device_are_part_of_more_and_never_for_testing() -> None:
    data = styles()["photo"]
    one, test = class_statistics.split("photo", data, "1", 0)
    all_of_them, same = class_statistics.split("photo", data, "all", 0)
    assert np.array_equal(test, same) and len(one) == 3
    assert set(one) < set(all_of_them) and not set(all_of_them) & set(test)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_pacs
@needs_backbone
def test_on_pacs_one_label_gains_twelve_points_and_twenty_labels_lose_nothing(tmp_path: Path) -> None:
    domains = {domain: features(domain, DATA, tmp_path, PICTURES) for domain in DOMAINS}
    kinds = ("cosine", "logistic", "nearest")
    few, many = (class_statistics.measured(domains, Cell(labels, "all"), SEEDS, kinds) for labels in (1, 20))
    assert few.gains.mean() >= 12
    assert many.gains.mean(axis=1).min() >= -0.5
