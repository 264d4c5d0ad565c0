"""The three heads that `tools.study.day_zero` compares on a cell: fitted on own labels only, the fleet's, and the one that a device serves.

Each is a function (z [n, d], y [n], cell) -> something with `logits`, or None where there is nothing to predict with. `HEADS` is the place
to plug another estimator in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from edge_fl import heads
from edge_fl.data.samples import Array
from tools.study.day_zero_cells import Cell

PSEUDO_COUNT = 0.5
RIDGE = 1e-2
"""Weight of |W|², in mean squared features."""
SHARPNESS = 10.0
OWN, FLEET, SERVED = "own", "fleet", "served"


class Fitted(Protocol):
    """A fitted head."""

    def logits(self, z: Array) -> Array:
        """Features [n, d] -> logits [n, C]."""


Fit = Callable[[Array, Array, Cell], Fitted | None]


@dataclass(frozen=True, eq=False)
class Linear:
    """Logits z @ weight.T + bias."""

    weight: Array
    bias: Array

    def logits(self, z: Array) -> Array:
        """Features [n, d] -> logits [n, C]."""
        return z @ self.weight.T + self.bias


def own(z: Array, y: Array, cell: Cell) -> Fitted | None:
    """The head that a device fits on its own labels alone; None without labels."""
    about = cell.about
    if not len(y):
        return None
    return heads.fit(
        "logistic", z, y, about.classes, unit_norm=about.unit_norm, plan=about.plan, extras=cell.extras
    )


def fleet(z: Array, y: Array, cell: Cell) -> Fitted:
    """The fleet's head: the method's shared head, else ridge regression on the full devices' features."""
    return Linear(cell.weight, cell.bias) if cell.about.head else pooled_ridge(cell)


def served(z: Array, y: Array, cell: Cell) -> Fitted:
    """The fleet's head with the log of the device's class shares, relative to equal shares. Keeps the place of the product's estimator."""
    counts = np.bincount(y, minlength=cell.about.classes) + PSEUDO_COUNT
    base = fleet(z, y, cell)
    assert isinstance(base, Linear)
    return Linear(base.weight, base.bias + np.log(counts / counts.mean()))


HEADS: Mapping[str, Fit] = {OWN: own, FLEET: fleet, SERVED: served}


@lru_cache(maxsize=1)
def pooled_ridge(cell: Cell) -> Linear:
    """Ridge regression of one-hot labels on the full devices' features, with intercept; its values times SHARPNESS are logits."""
    z, target = cell.fleet_z.astype(float), np.eye(cell.about.classes)[cell.fleet_y]
    mean, centre = z.mean(0), target.mean(0)
    gram = (z - mean).T @ (z - mean)
    weight = RIDGE * np.trace(gram) / len(gram)
    solved = np.linalg.solve(gram + weight * np.eye(len(gram)), (z - mean).T @ (target - centre)).T
    return Linear(SHARPNESS * solved, SHARPNESS * (centre - solved @ mean))
