"""The head `auto` takes what validates best, within its budget, and shows from how many labels on which kind does."""

from itertools import count

import numpy as np

from edge_fl import heads, metrics
from edge_fl.heads import Head
from edge_fl.heads.auto import CANDIDATES, HeldOut, choose

CENTRES = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32) * 2
NOTHING = HeldOut(np.empty((0, 6), np.float32), np.empty(0, np.int64))


def some(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    y = np.arange(count) % 3
    noise = np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)
    return CENTRES[y] + noise, y


def rings(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A class around the other: no line between them, and one mean for both."""
    y = np.arange(count) % 2
    z = np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)
    return z / np.linalg.norm(z, axis=1, keepdims=True) * (1 + 2 * y[:, None]).astype(np.float32), y


def fit(kind: str, z: np.ndarray, y: np.ndarray) -> Head:
    return heads.fit(kind, z, y, 3, unit_norm=False)


def test_where_no_line_divides_the_classes_the_mlp_is_taken() -> None:
    found = choose(fit, *rings(200, 1), HeldOut(*rings(60, 2)), budget_s=60, clock=lambda: 0.0)
    assert found.head.kind == "mlp"
    assert found.numbers[metrics.candidate("mlp")] > found.numbers[metrics.candidate("logistic")] + 0.2


def test_of_equals_the_cheapest_is_taken() -> None:
    z, y = some(90, 1)
    far = z + 100 * CENTRES[y]
    assert choose(fit, far, y, HeldOut(far, y), budget_s=60, clock=lambda: 0.0).head.kind == "nearest"


def test_without_held_out_samples_folds_decide_and_one_label_each_is_enough() -> None:
    assert choose(fit, *rings(120, 1), NOTHING, budget_s=60, clock=lambda: 0.0).head.kind == "mlp"
    assert choose(fit, *some(3, 1), NOTHING, budget_s=60, clock=lambda: 0.0).head.kind == "nearest"


def test_a_single_class_is_a_constant() -> None:
    z, _ = some(6, 1)
    assert (
        choose(fit, z, np.ones(6, np.int64), NOTHING, budget_s=60, clock=lambda: 0.0).head.kind == "constant"
    )


def test_the_budget_ends_the_search_but_never_the_head() -> None:
    ticks = count()
    found = choose(fit, *rings(60, 1), HeldOut(*rings(30, 2)), budget_s=1.5, clock=lambda: float(next(ticks)))
    assert found.head.kind in CANDIDATES[:2] and metrics.candidate("svm") not in found.numbers


def test_a_kind_that_runs_out_of_memory_is_passed_over() -> None:
    def poor(kind: str, z: np.ndarray, y: np.ndarray) -> Head:
        if kind == "mlp":
            raise MemoryError
        return fit(kind, z, y)

    found = choose(poor, *rings(60, 1), NOTHING, budget_s=60, clock=lambda: 0.0)
    assert found.head.kind != "mlp" and metrics.candidate("mlp") not in found.numbers


def test_the_curve_says_how_good_each_kind_is_with_so_many_labels() -> None:
    found = choose(fit, *some(60, 1), HeldOut(*some(60, 2)), budget_s=60, clock=lambda: 0.0).numbers
    few, many = (found[metrics.at_labels(labels, "logistic")] for labels in (1, 20))
    assert many > few and metrics.at_labels(5, "nearest") in found
    assert not any("labels_50" in name for name in found)
