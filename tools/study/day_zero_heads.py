"""The three heads that `tools.study.day_zero` compares on a cell: fitted on own labels only, the fleet's, and the one that a device serves.

All are fitted by the product, with the extras that a release brings. Each is a function (z [n, d], y [n], cell) -> something with
`logits`, or None where there is nothing to predict with.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from edge_fl import heads
from edge_fl.data.samples import Array
from edge_fl.heads import HeadPlan, fleet
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.head import Extras
from edge_fl.methods import PRETRAINED
from edge_fl.wire import tensors
from edge_fl_server.release import fleet_head
from tools.study.day_zero_cells import Cell

OWN, FLEET, SERVED = "own", "fleet", "served"


class Fitted(Protocol):
    """A fitted head."""

    def logits(self, z: Array) -> Array:
        """Features [n, d] -> logits [n, C]."""


Fit = Callable[[Array, Array, Cell], Fitted | None]


def own(z: Array, y: Array, cell: Cell) -> Fitted | None:
    """The head that a device fits on its own labels alone; None without labels."""
    return _fitted(z, y, cell, replace(cell.about.plan, fleet=""), cell.extras) if len(y) else None


def fleets_head(z: Array, y: Array, cell: Cell) -> Fitted:
    """The fleet's head: what a device serves without labels."""
    return _fitted(z[:0], y[:0], cell, *release(cell))


def served(z: Array, y: Array, cell: Cell) -> Fitted:
    """The fleet's head, adapted to the labels."""
    return _fitted(z, y, cell, *release(cell))


HEADS: Mapping[str, Fit] = {OWN: own, FLEET: fleets_head, SERVED: served}


@lru_cache(maxsize=1)
def release(cell: Cell) -> tuple[HeadPlan, Extras]:
    """The plan and the extras of a release: the fleet's head of a simulated source, or class statistics where nothing was trained."""
    about = cell.about
    each = [cell.fleet_device == device for device in np.unique(cell.fleet_device)]
    if about.method == PRETRAINED:
        found = [_statistics(cell.fleet_z[rows], cell.fleet_y[rows], about.classes) for rows in each]
        prior = sums.from_flat(np.sum([one.flat for one in found], axis=0), found[0].shape)
        return replace(about.plan, fleet=PRIOR), {PRIOR: prior.arrays()}
    features = ((cell.fleet_z[rows], cell.fleet_y[rows]) for rows in each)
    method = replace(about.plan, fleet=about.head)
    extra = fleet_head.of_features(features, about.classes, method, cell.extras)
    plan = replace(about.plan, fleet=fleet.FLEET, shares=extra.shares)
    return plan, tensors.unpack(extra.payload)


def _statistics(z: Array, y: Array, classes: int) -> sums.Statistics:
    return sums.of(z, y, classes, sums.uncounted(sums.keys_of(z), y, {}))


def _fitted(z: Array, y: Array, cell: Cell, plan: HeadPlan, extras: Extras) -> Fitted:
    about = cell.about
    return heads.fit("logistic", z, y, about.classes, unit_norm=about.unit_norm, plan=plan, extras=extras)
