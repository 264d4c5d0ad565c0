"""The study of prediction sets on one small cell: devices share images, and the table has a line for each number of labels."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl.heads import HeadPlan
from tools.study import day_zero_cells, promise, promise_cells
from tools.study.day_zero_cells import About
from tools.study.promise_cells import BALANCED, CIFAR, SHARES, Shared, balanced, own_shares

CLASSES, DIM = 3, 8


def cell(rng: np.random.Generator) -> Shared:
    centres = 2 * rng.normal(size=(CLASSES, DIM))
    y = np.arange(600) % CLASSES
    z = (centres[y] + 1.5 * rng.normal(size=(600, DIM))).astype(np.float32)
    drawn = [balanced(y, rng) for _ in range(3)] + [own_shares(y, rng) for _ in range(3)]
    sizes = np.array([[len(own), len(rest)] for own, rest in drawn])
    about = About(CIFAR, "fedavg", 0, (BALANCED,) * 3 + (SHARES,) * 3, CLASSES, False, HeadPlan())
    none = np.empty(0, np.float32)
    fleet = np.arange(200)
    return Shared(
        about, z, y, y[:0], y[:0] > 0, z[fleet], y[fleet], fleet // 50, np.zeros((4, CLASSES), np.int64), none, none,
        np.concatenate([own for own, _ in drawn]), np.concatenate([rest for _, rest in drawn]), sizes,
    )  # fmt: skip


def test_devices_of_a_cell_share_images_and_keep_labels_and_tests_apart(tmp_path: Path) -> None:
    found = cell(np.random.default_rng(0))
    day_zero_cells.write(tmp_path / "cell.npz", found)
    again = day_zero_cells.read(tmp_path / "cell.npz", Shared)
    for device, kind in enumerate(again.about.rows):
        own, rest, weights = again.labels(device), again.tests(device), again.weights(device)
        assert np.array_equal(own, found.labels(device)) and not set(own) & set(rest)
        assert np.isclose(weights.sum(), 1) and len(weights) == len(rest)
        if kind == BALANCED:
            assert (np.bincount(again.y[own[: 10 * CLASSES]]) == 10).all()
            assert np.allclose(np.bincount(again.y[rest], weights), 1 / CLASSES)


def test_the_table_has_each_number_of_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promise_cells, "SEEDS", {CIFAR: 1})
    (place,) = promise_cells._places(CIFAR)
    day_zero_cells.write(place.path(tmp_path), cell(np.random.default_rng(1)))
    promise.main(["--datasets", CIFAR, "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    for kind in (BALANCED, SHARES):
        for labels in promise_cells.PER_CLASS:
            assert f"| {CIFAR} | {kind} | {labels} | 3 |" in shown
    assert "Promise 0.9: mean coverage over n devices" in shown
