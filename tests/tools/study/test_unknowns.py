"""The study of unknown classes on made devices: a class far from all others is found, and the table has what each row claims."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl.heads import HeadPlan
from edge_fl.methods import PRETRAINED
from tools.study import day_zero_cells, promise_cells, unknowns
from tools.study.day_zero_cells import About
from tools.study.promise_cells import Shared

CLASSES, DIM = 4, 24
LABELS, TESTS = 12, 60
"""Of each class."""


def made(seed: int) -> Shared:
    """One device and a fleet of two, with separable classes."""
    rng = np.random.default_rng(seed)
    centres = 3 * rng.normal(size=(CLASSES, DIM))

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.tile(np.arange(CLASSES), count)
        return np.maximum(centres[y] + rng.normal(size=(len(y), DIM)), 0).astype(np.float32), y

    z, y = some(LABELS + TESTS)
    fleet_z, fleet_y = some(60)
    test = np.arange(len(y)) >= LABELS * CLASSES
    device = np.arange(len(fleet_y)) // (len(fleet_y) // 2)
    counts = np.stack([np.bincount(fleet_y[device == each], minlength=CLASSES) for each in (0, 1)])
    about = About(
        promise_cells.PACS, PRETRAINED, seed, (promise_cells.BALANCED,), CLASSES, False, HeadPlan("cosine")
    )
    empty, nobody = np.empty(0, np.float32), np.empty(0, np.int64)
    own, rest = np.flatnonzero(~test), np.flatnonzero(test)
    sizes = np.array([[len(own), len(rest)]])
    shared = fleet_z, fleet_y, device, counts, empty, empty
    return Shared(about, z, y, nobody, nobody > 0, *shared, own, rest, sizes)


def test_a_distant_class_is_found_and_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknowns, "PER_CLASS", (10,))
    found = dict[str, list[tuple[float, ...]]]()
    for (count, row), each in unknowns.of_cell(made(1), 1):
        assert count == 10
        found.setdefault(row, []).append(tuple(each))
    assert len(found[unknowns.BEST]) == CLASSES
    false, share, best = np.mean(found[unknowns.WITH_POOL], axis=0)
    assert false < 0.15 and share > 0.6 and best > 0.8
    right = np.mean(found["the same: predicted right"], axis=0)[1]
    assert right > 0.6  # the fleet knows the class
    assert np.mean(found[unknowns.KNOWN_TO_FLEET], axis=0)[1] < 0.4
    size, lost = np.mean(found["with the lost class"], axis=0)
    assert size > 10 and lost > 0.8


def test_the_command_prints_both_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknowns, "PER_CLASS", (10,))
    for place in promise_cells._places(promise_cells.PACS):
        day_zero_cells.write(place.path(tmp_path), made(place.seed))
    unknowns.main(["--out", str(tmp_path), "--sets", "pacs", "--cells", "1"])
    shown = capsys.readouterr().out
    assert "| 10 | knows the class | 4 | 5.0% |" in shown and "Suggested classes, pacs" in shown
